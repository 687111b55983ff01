"""Agents that run in worker processes (``rollout.agent_mode: subprocess``)."""
