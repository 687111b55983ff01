"""``agentrl init``: a project to begin with."""
