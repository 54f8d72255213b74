"""Somebody's script, run in this process as Python itself would run it."""
