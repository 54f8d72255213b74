"""Changes that are tried on a replay, and what they prove."""
