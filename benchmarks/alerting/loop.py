"""The loop that all trainings of the benchmark share, as people write it, under `ampdoctor.watch`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ampdoctor import watch

Batch = tuple[Tensor, ...]
AFTER_NAN = 60
"""Steps that a training goes on without a finite loss."""


@dataclass
class Run:
    """A training that is about to begin. A fault changes its parts while it goes on.

    Attributes:
        model: What learns.
        optimizer: Of its parameters.
        batch: The data of a step; the same for the same step.
        loss: Of a batch, with the model as it is.
        clean: Data that no step has and no fault touches, by which harm is measured.
        steps: How many.
        factor: What each learning rate is multiplied by at a step.
        clip: Largest gradient norm; None for no clipping.
        scaler: Where the model computes in fp16.
        after: What the loop does besides, after each update: a moving average.
        rates: The learning rates that the factor multiplies, one a parameter group.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Batch]
    loss: Callable[[Batch], Tensor]
    clean: Batch
    steps: int
    factor: Callable[[int], float] = lambda _: 1.0
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    after: Callable[[], None] = lambda: None
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rates = self.rates or [group["lr"] for group in self.optimizer.param_groups]

    def named(self, pattern: str) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose name the pattern is found in."""
        return [(name, p) for name, p in self.model.named_parameters() if re.search(pattern, name)]


class Fault:
    """What goes wrong; this one does nothing, and is the healthy twin's.

    Args:
        onset: The first step at which it does something.
    """

    def __init__(self, onset: int = 0) -> None:
        self.onset = onset

    def begin(self, run: Run) -> None:
        """Before the first step."""

    def before(self, run: Run, step: int) -> None:
        """From the onset on, before the step's forward, when the schedule has set the learning rates."""

    def batch(self, run: Run, step: int, batch: Batch) -> Batch:  # noqa: ARG002 - for those that replace it
        """From the onset on: the step's data."""
        return batch

    def zeroes(self, step: int) -> bool:  # noqa: ARG002 - likewise
        """From the onset on: whether gradients are zeroed before the step."""
        return True

    def gradients(self, run: Run, step: int) -> None:
        """From the onset on, after the backward and before unscaling and clipping."""

    def after(self, run: Run, step: int) -> None:
        """From the onset on, after the update."""


def train(run: Run, fault: Fault, folder: Path, *, every: int) -> list[float]:
    """Trains under the watch, with the log in a folder, and returns the losses of the steps.

    Args:
        run: What trains.
        fault: What goes wrong.
        folder: Of the log.
        every: Steps from one look at single tensors to the next.
    """
    losses: list[float] = []
    with _silent(), watch(run.model, run.optimizer, folder=folder, every=every, look="off", bundle=False):
        fault.begin(run)
        while len(losses) < run.steps and not ended_in_nan(losses):
            losses.append(take_step(run, fault, len(losses))[0])
    return losses


@contextmanager
def _silent() -> Iterator[None]:
    """What the watch says of sick steps is not what is judged here."""
    logger = logging.getLogger("ampdoctor")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def ended_in_nan(losses: list[float]) -> bool:
    """Whether the last steps all had no finite loss: what comes then tells nothing more."""
    return len(losses) >= AFTER_NAN and not any(math.isfinite(loss) for loss in losses[-AFTER_NAN:])


def take_step(run: Run, fault: Fault, step: int) -> tuple[float, bool]:
    """Returns the loss, and whether the update was applied."""
    for group, rate in zip(run.optimizer.param_groups, run.rates, strict=True):
        group["lr"] = rate * run.factor(step)
    sick = step >= fault.onset
    if sick:
        fault.before(run, step)
    batch = run.batch(step)
    loss = run.loss(fault.batch(run, step, batch) if sick else batch)
    if not sick or fault.zeroes(step):
        run.optimizer.zero_grad()
    (loss if run.scaler is None else run.scaler.scale(loss)).backward()
    if sick:
        fault.gradients(run, step)
    applied = _update(run)
    run.after()
    if sick:
        fault.after(run, step)
    return loss.item(), applied


def _update(run: Run) -> bool:
    """Clip and step; False where the scaler skips."""
    if run.scaler is None:
        if run.clip is not None:
            nn.utils.clip_grad_norm_(run.model.parameters(), run.clip)
        run.optimizer.step()
        return True
    if run.clip is not None:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), run.clip)
    before = run.scaler.get_scale()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return run.scaler.get_scale() >= before


@torch.no_grad()
def clean_loss(run: Run) -> float:
    """The loss on the clean data, with the model as it is now."""
    run.model.eval()
    loss = run.loss(run.clean).item()
    run.model.train()
    return loss
