"""Functions that users call inside their own training loop."""
