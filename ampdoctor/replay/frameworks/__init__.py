"""Makes a `TrainingRun` from a framework's objects: the adapters of all frameworks and their table."""
