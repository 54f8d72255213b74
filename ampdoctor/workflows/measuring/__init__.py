"""Measures ranges on a replay, and lossless shadows of half steps."""
