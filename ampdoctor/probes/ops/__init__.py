"""One op call: its arguments, its name, its place in the user's code, its recomputation."""
