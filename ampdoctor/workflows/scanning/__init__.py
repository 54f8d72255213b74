"""Examines checkpoints one by one, against each other, and as a family."""
