"""Rules on a checkpoint's tensors."""
