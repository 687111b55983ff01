"""From a configuration to running processes."""
