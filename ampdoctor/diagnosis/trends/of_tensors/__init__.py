"""Rules on a run's tensors over its looks at them: one file each."""
