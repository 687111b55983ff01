"""Making trajectories: workflows, rewards, datasets, and the scheduling of groups."""
