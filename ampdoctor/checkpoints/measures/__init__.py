"""Measures checkpoints: every tensor is read once, in bounded memory."""
