"""What the parts of a saved object are: models, optimizers, scalers, counters, and whose moment is whose."""
