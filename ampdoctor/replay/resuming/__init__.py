"""Puts a checkpoint into a run: weights, optimizer state, scaler, schedulers."""
