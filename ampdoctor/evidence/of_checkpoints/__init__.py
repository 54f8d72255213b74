"""What was read from one or several checkpoints."""
