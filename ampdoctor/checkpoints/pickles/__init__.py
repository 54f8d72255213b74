"""Reads pickles without importing or calling anything, and searches their contents."""
