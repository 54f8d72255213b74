"""Checkpoints in numbers: every tensor read once, in bounded memory."""
