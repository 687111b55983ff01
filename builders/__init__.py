"""Example agent builders, one file per agent."""
