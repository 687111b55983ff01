"""Reading a run folder: queries, terminal views."""
