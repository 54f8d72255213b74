"""Replays training runs: a run's parts, the factory that makes them, the session that steps it, and snapshots."""
