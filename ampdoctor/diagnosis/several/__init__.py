"""Rules on several checkpoints of one training."""
