"""Replays a training run: the run's parts, the factory that makes them, the step engine, snapshots."""
