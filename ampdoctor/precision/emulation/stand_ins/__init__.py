"""Torch's own functions in the place of libraries that need a GPU."""
