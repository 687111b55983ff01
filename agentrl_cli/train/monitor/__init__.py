"""What is watched while a run trains: its metrics, alarms, and loggers."""
