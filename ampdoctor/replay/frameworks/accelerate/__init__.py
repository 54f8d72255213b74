"""Accelerate: what it has prepared is a run; its own objects take the steps."""
