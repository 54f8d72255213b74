"""Leads from a checkpoint up to a recorded step: the updates that were recorded between the two are made again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.nested import copy_batch, move_batch
from ampdoctor.hooks.program import updates_made
from ampdoctor.replay.recorded.stepping import RecordedStep

if TYPE_CHECKING:
    from ampdoctor.hooks.program import EarlierStep, Leading, Program

AGREE = 1e-3
"""Relative difference of a loss up to which it is the same: other machines and numbers of threads round otherwise."""
_LEAST = 1e-30


class LeadUp:
    """Tells at which of the recorded steps a checkpoint stands, and makes the updates from there again.

    Args:
        program: The step that they lead up to.
        leading: What was recorded before it.
    """

    def __init__(self, program: Program, leading: Leading) -> None:
        self._program, self._leading = program, leading
        self._settings = () if program.optimizer is None else tuple(map(_settings, program.optimizer.param_groups))

    def __call__(self, loaded: Collection[str], say: Callable[[str], None]) -> Iterator[EarlierStep]:
        """As `TrainingRun.lead_up`.

        Args:
            loaded: The parts of the checkpoint that are in the run by now, as in `ResumeReport`.
            say: Told where the checkpoint stands, in a sentence.

        Raises:
            CheckpointError: It was saved before what was recorded, or after the step.
        """
        optimizer = self._program.optimizer
        if optimizer is None:
            return
        behind = self._from(self._updates_of_the_checkpoint(optimizer, loaded), say)
        off: list[float] = []
        for one, loss in zip(behind, self._leading.losses[len(self._leading.losses) - len(behind) :], strict=True):
            yield f"the recorded step {one.step}", partial(_again, one, loss, off.append)
        _put(optimizer, self._settings)
        others = [one for one in off if not one <= AGREE]
        if others:
            by = f", by up to {max(others):.2g} of it" if all(map(math.isfinite, others)) else ", and not finite"
            say(
                f"{len(others)} of the {_counted(len(behind))} have another loss here than in the training{by}: the "
                "weights before the step are others than it had"
            )

    def _updates_of_the_checkpoint(self, optimizer: torch.optim.Optimizer, loaded: Collection[str]) -> int | None:
        return 0 if "optimizer" in loaded and not optimizer.state else updates_made(optimizer)

    def _from(self, stands: int | None, say: Callable[[str], None]) -> tuple[Program, ...]:
        """The recorded updates from a checkpoint on, by how many its optimizer had made when it was saved."""
        steps, made, step = self._leading.steps, self._leading.made, self._program.step
        if stands is None or made is None:
            who = "the optimizer" if made is None else "the checkpoint"
            place = f"the first of the {_counted(len(steps))} before it" if steps else "the step"
            say(
                f"{who} does not count its updates: the checkpoint is taken to have been saved right before {place}; "
                "if it was not, the weights are others than the training's"
            )
            return steps
        first = made - len(steps)
        if not first <= stands <= made:
            holds = f"steps {step - len(steps)} to {step}" if steps else f"step {step} alone"
            fits = f"{first} to {made}" if steps else str(made)
            when = f"after the update of step {step}" if stands > made else f"too long before step {step}"
            raise CheckpointError(
                f"the checkpoint was saved {when}: its optimizer had made {stands} updates, and the bundle holds "
                f"{holds}, which go on from {fits} updates"
            )
        behind = steps[len(steps) - (made - stands) :]
        if behind:
            were = "was" if len(behind) == 1 else "were"
            say(
                f"{_counted(len(behind))} {were} made again from the checkpoint, to come to the weights before the step"
            )
        return behind


def _counted(updates: int) -> str:
    return f"{updates} recorded update{'' if updates == 1 else 's'}"


def _again(
    program: Program, then: float | None, differs: Callable[[float], None], model: nn.Module, scaler: Any
) -> None:
    """Makes an update again, and tells by how much of it its loss differs from what it was then."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if program.optimizer is not None:
        _put(program.optimizer, program.settings)
    given = list(move_batch(copy_batch(program.given), device))  # a step may write into what several were given
    loss = RecordedStep(program).run(model, given, scaler)
    if loss is not None and then is not None:
        differs(abs(float(loss) - then) / max(abs(then), _LEAST))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _put(optimizer: torch.optim.Optimizer, settings: Collection[Mapping[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
