"""When a scaler that keeps skipping steps counts as dead, for a replay and for a loop that is watched."""

from __future__ import annotations

PERSISTS = 4
"""Steps in a row, up to the end, that a scaler must skip before it counts as unable to settle, if it ever stepped.

A scaler that has just doubled its scale skips one step; an overflow of h binades is left after h more.
"""
NEVER_UPDATED = "scaler.update() is never called, so the scale never changes: call it once, after scaler.step."
