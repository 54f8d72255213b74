"""Observations of a replayed or watched run."""
