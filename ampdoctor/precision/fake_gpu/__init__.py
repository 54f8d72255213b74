"""Fake gpu."""
