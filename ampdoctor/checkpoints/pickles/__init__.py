"""Pickles read without importing or calling anything, and what stands in them."""
