"""Judges runs over time, from their logs."""
