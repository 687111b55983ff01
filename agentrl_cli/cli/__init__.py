"""Commands: one file each; heavy imports stay inside the bodies."""
