"""Runs over their steps, from their logs."""
