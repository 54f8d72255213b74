"""Searches by trials: where harm begins, and the smallest set that cures. No torch, no model."""
