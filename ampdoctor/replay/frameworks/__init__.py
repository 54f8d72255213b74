"""What frameworks hand over in place of a `TrainingRun`: one adapter a file, in one table."""
