"""The processes of a run: what starts, watches and ends them, and the programs they run."""
