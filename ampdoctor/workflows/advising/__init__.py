"""Settings and precisions derived from what was measured."""
