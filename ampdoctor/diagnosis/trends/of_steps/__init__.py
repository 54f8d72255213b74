"""Rules on a run's steps: one file each."""
