"""The order of keys for people: JSON sorts its keys, so a report that was read back has lost their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RUN = (
    "device",
    "policy",
    "half_products",
    "precision",
    "autocast",
    "steps",
    "replays",
    "torch",
    "torch_shims",
    "threads",
    "notes",
    "deterministic",
    "strategy",
    "partial_replays",
    "bad_step_replays",
    "saved",
)
"""Facts about a replay, in the order in which the workflows write them."""
TARGET = ("path", "profile", "factory", "checkpoint", "format")
SCALER = ("init_scale", "scale", "growth_factor", "backoff_factor", "growth_interval")
"""Settings of a loss scaler, in the order of GradScaler's signature."""


def in_order(values: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """Return the mapping with the keys of `first` in that order, and the others after them, sorted."""
    known = [name for name in first if name in values]
    return {name: values[name] for name in (*known, *sorted(values.keys() - set(known)))}
