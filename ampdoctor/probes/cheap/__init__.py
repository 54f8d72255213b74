"""One reduction for each tensor: the look that says whether to look closer."""
