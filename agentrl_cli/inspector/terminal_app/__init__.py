"""The full-screen application of ``agentrl inspect-trajectories``."""
