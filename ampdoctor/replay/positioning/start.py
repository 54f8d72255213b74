"""Functions of batches that are told where to begin. No torch here: a training script may ask before it imports any."""

from __future__ import annotations

import inspect
from typing import Any

START = "start"
"""The parameter by which a function of batches asks for the place."""


def takes_start(batches: Any) -> bool:
    """Is it a function that is called with the number of optimizer steps behind the run?"""
    if not callable(batches) or hasattr(batches, "__iter__"):
        return False
    try:
        found = inspect.signature(batches).parameters.get(START)
    except (TypeError, ValueError):  # a builtin, or a C callable
        return False
    return found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY
