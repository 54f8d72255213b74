"""What Accelerate keeps for the whole process: device, precision, and how far an accumulation is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CLASSES = ("PartialState", "AcceleratorState", "GradientState")


@contextmanager
def own_state() -> Iterator[None]:
    """It is made anew inside, and is afterwards as before."""
    kept = [(shared, dict(shared)) for shared in shared_states()]
    for shared, _ in kept:
        shared.clear()
    try:
        yield
    finally:
        for shared in shared_states():
            shared.clear()
        for shared, before in kept:
            shared.update(before)


def shared_states() -> list[dict[str, Any]]:
    """Returns the dictionaries that hold it; [] where Accelerate is not imported."""
    module = sys.modules.get("accelerate.state")
    found = (getattr(module, name, None) for name in _CLASSES)
    return [cls._shared_state for cls in found if cls is not None]
