"""Bytes that are read by position, and tensors that are still in them."""
