"""A recorded step, run again."""
