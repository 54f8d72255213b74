"""The writer of a run's log: one thread and one file at a time; the training gets nothing back."""
