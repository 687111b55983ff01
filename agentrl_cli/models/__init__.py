"""The built-in tiny model and the supervised warm start."""
