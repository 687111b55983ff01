"""A page about a run, in a browser: written to a file, or served while the run continues."""
