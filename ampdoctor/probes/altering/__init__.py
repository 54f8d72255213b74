"""Probes that change what an op computes, to see whether that cures."""
