"""Rules on runs over time."""
