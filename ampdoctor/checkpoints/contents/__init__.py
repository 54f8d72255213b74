"""Tells the parts of a saved object: models, optimizers, scalers, counters, and which parameter a moment belongs to."""
