"""Example reward functions."""
