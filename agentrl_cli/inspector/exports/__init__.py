"""What is read of a run outside of agentrl: a file for each format."""
