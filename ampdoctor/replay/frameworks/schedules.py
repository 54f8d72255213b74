"""Lets a learning-rate schedule go on where a checkpoint stands: a replay loads its weights and optimizers only."""

from __future__ import annotations

import math
import warnings
from typing import Any

from ampdoctor.replay.scaler_state import clone


def place_schedule(scheduler: Any, steps: int) -> None:
    """Move a fresh schedule on; the rates that the checkpoint has brought stay.

    Where skipped updates did not count, the schedule stands earlier: at the last place that gives those rates.

    Args:
        scheduler: A scheduler of torch's.
        steps: How often it was stepped at most.
    """
    groups = scheduler.optimizer.param_groups
    loaded = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    begun, rates = clone(scheduler.state_dict()), list(scheduler.get_last_lr())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has not stepped here yet
        place = _walk(scheduler, rates, steps, [float(values["lr"]) for values in loaded])
        if place is not None and place < steps:
            scheduler.load_state_dict(begun)
            _walk(scheduler, rates, place, [])
    for group, values in zip(groups, loaded, strict=True):
        group.update(values)


def _walk(scheduler: Any, rates: list[Any], steps: int, wanted: list[float]) -> int | None:
    """Step it from its first rates; returns after how many steps it gave the wanted rates last."""
    groups, found = scheduler.optimizer.param_groups, None
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for count in range(1, steps + 1):
        scheduler.step()
        now = (float(group["lr"]) for group in groups)
        if wanted and all(math.isclose(mine, theirs, rel_tol=1e-9) for mine, theirs in zip(now, wanted, strict=True)):
            found = count
    return found
