"""Bundles: folders with a recorded step, which can be replayed on another machine."""
