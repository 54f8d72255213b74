"""What leads up to a recorded step whose weights are not known: a checkpoint from before it, and the updates since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ampdoctor.loop.recorded.program import Program

    EarlierStep = tuple[str, Callable[[nn.Module, Any], None]]
    """A step that is made again before those of a run: what it is, and what makes it, of model and scaler."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leading:
    """The recorded updates before a step; its weights and its optimizer's state are those of a checkpoint.

    Attributes:
        steps: The programs of the last updates before it, oldest first, none left out.
        losses: The sum of each one's losses in the training; None where it is not known.
        made: How many updates its optimizer had made before it, as its state counts them; None where it does not.
        left_out: Why there are no more of them, in sentences.
    """

    steps: tuple[Program, ...] = ()
    losses: tuple[float | None, ...] = ()
    made: int | None = None
    left_out: tuple[str, ...] = ()


def updates_made(optimizer: torch.optim.Optimizer) -> int | None:
    """Returns how many updates an optimizer has made, as its state counts them; None where it counts none.

    That of the parameter with the most: some have no gradient in every step. A device is waited for.
    """
    counted = (state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state)
    return max((number for one in counted if (number := _whole(one)) is not None), default=None)


def _whole(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, not finite, or several
        return None
