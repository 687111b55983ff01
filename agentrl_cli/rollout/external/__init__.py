"""Trajectories made by programs elsewhere (``rollout.agent_mode: external``)."""
