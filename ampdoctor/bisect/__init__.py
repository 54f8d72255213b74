"""Searches that run a trial at a time: where harm begins, the smallest set that cures. No torch, no model."""
