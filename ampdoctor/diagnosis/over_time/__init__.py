"""A run judged while it goes on: what each number usually is, and what leaves it."""
