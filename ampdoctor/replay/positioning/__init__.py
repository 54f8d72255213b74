"""Where a run's batches begin: at the place in the data at which its checkpoint was saved."""
