"""The writer of a run's log: one thread, one file at a time, and no word to the training."""
