"""What a script makes anew in each round of its training loop: a scaler in each epoch's function.

A replay that begins the loop anew puts it back to its beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampdoctor.replay.scaler_state import ScalerSnapshot
from ampdoctor.replay.scripts.made import Made
from ampdoctor.replay.scripts.source.finding import LoopPlace
from ampdoctor.replay.scripts.source.statements import lines_of_loop


class Mark(Enum):
    """Stands among a step's items."""

    NEW_ROUND = "the loop begins anew"


def made_in(made: Made, loop: LoopPlace) -> tuple[Any, ...]:
    """Returns the optimizers, scalers and schedulers that a round of a loop makes.

    Args:
        made: What the script has made.
        loop: The loop around the training loop, or around the call that leads to it.
    """
    lines = lines_of_loop(Path(loop.file).read_bytes(), loop.line)
    return made.by_lines(loop.file, lines)


def put_back(made: Iterable[Any]) -> Callable[[], None]:
    """Returns what gives each the state that it has now, as where it is made anew.

    Args:
        made: Optimizers, scalers and schedulers, when the first round comes to the loop.
    """
    puts = [_beginning_of(one) for one in made]

    def begin() -> None:
        for put in puts:
            put()

    return begin


def _beginning_of(made: Any) -> Callable[[], None]:
    if isinstance(made, torch.amp.GradScaler):
        return partial(ScalerSnapshot.of(made).restore, made)
    state = copy.deepcopy(made.state_dict())
    if isinstance(made, LRScheduler):
        rates = [group["lr"] for group in made.optimizer.param_groups]

        def begin() -> None:
            made.load_state_dict(copy.deepcopy(state))
            for group, rate in zip(made.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        return begin
    return lambda: made.load_state_dict(copy.deepcopy(state))
