"""Reads any tool's log as lines of a run's log."""
