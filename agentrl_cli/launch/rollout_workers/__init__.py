"""Rollout workers: processes that each run a share of the trajectories."""
