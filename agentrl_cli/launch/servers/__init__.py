"""Engine servers as processes: what they run on, their command lines, their supervision."""
