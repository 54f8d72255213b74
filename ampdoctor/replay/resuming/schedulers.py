"""Puts a checkpoint's learning-rate schedule into a run: the steps after it have the training's own rates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any


def load_schedulers(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> str | None:
    """Load the saved schedules into the run's schedulers, all or none.

    Args:
        schedulers: The run's, each with `step()`.
        saved: State dicts, in the order in which they were saved.

    Returns:
        Why nothing was loaded, as a predicate of the checkpoint; None where all were, or the run has none.
    """
    able = [one for one in schedulers if callable(getattr(one, "load_state_dict", None))]
    if not able:
        return None
    if not saved:
        return "holds no schedule of the learning rate: it is as the factory makes it"
    if len(saved) != len(able):
        return f"holds {len(saved)} schedules of the learning rate, and the run has {len(able)}: none was loaded"
    before = [copy.copy(vars(one)) for one in able]
    for one, state in zip(able, saved, strict=True):
        try:
            one.load_state_dict(copy.deepcopy(dict(state)))
        except Exception as error:  # noqa: BLE001 - a class of the user's, or of another torch's
            for other, values in zip(able, before, strict=True):
                vars(other).clear()
                vars(other).update(values)
            return f"holds a schedule that {type(one).__name__} does not load ({type(error).__name__}: {error})"
    return None
