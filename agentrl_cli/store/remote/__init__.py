"""Where run folders last that are not on this machine."""
