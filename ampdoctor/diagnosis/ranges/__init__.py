"""Rules on measured ranges and on loss scales."""
