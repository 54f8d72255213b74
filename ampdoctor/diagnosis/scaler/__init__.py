"""Rules on the state of a loss scaler."""
