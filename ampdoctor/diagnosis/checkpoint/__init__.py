"""Rules on what a checkpoint holds."""
