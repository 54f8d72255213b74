"""Watches a user's training loop while it runs."""
