"""Where metrics and trajectories go besides the run folder."""
