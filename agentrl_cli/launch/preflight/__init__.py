"""Before a run: whether the training that a configuration describes will work."""
