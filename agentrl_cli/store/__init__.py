"""The run folder: the only code that knows its paths and file formats."""
