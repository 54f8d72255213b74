"""Probes of a replay: the cheap non-finite check, and the op-by-op trace of one step."""
