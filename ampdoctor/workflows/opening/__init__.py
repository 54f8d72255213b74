"""Prepares a run for the questions: its request, its parts, the step that fires, its history."""
