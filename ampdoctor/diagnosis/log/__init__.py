"""Rules on the training log beside a checkpoint."""
