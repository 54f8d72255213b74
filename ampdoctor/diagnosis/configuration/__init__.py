"""Rules on the configuration itself."""
