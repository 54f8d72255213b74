"""What was read from a checkpoint, or from several."""
