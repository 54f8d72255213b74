"""Rules on what a replay has shown."""
