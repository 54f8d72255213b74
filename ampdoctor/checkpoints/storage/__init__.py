"""Bytes by position, and tensors that still lie in them."""
