"""Three spikes whose logs were published, behind a stretch that was not: that one is made, and quiet.

Gradient norms and losses are those of BigScience's logs of BLOOM-176B and of its 104B trainings (experiments 11 and
12). Of what came before, one or two steps are at hand; 600 quiet steps before them are drawn here, log-normal about the
smallest of the published norms with a standard deviation of 15 %.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ampdoctor.evidence.log_records import StepLine

QUIET = 600
"""Steps that are made."""


@dataclass(frozen=True)
class Spike:
    """A published spike.

    Attributes:
        name: Of the run.
        first: Step of the first published number.
        norms: Gradient norms from there on.
        losses: Losses from there on; the last known one stands where none was published.
        jump: The step at which the norm first left what was usual.
        loss_spike: The step at which the loss did.
    """

    name: str
    first: int
    norms: tuple[float, ...]
    losses: tuple[float, ...]
    jump: int
    loss_spike: int


SPIKES = (
    Spike(
        "BLOOM-176B",
        31214,
        (0.242, 0.947, 2.39, 15.9, 145.0, 960.0),
        (2.35, 2.35, 2.60, 2.60, 2.60, 5.10),
        31215,
        31219,
    ),
    Spike("104B, experiment 11", 11446, (1.3e4, 2.6e5, 2.6e5), (3.11, 3.11, 7.71), 11447, 11448),
    Spike("104B, experiment 12", 8738, (2.3e5, 9e4, 1.5e6, 1.5e6), (3.68, 3.68, 3.68, 7.27), 8740, 8741),
)


def steps_of(spike: Spike, seed: int) -> Iterator[StepLine]:
    """The quiet steps, and the published ones behind them."""
    draw = random.Random(f"{seed}/{spike.name}")
    quiet = min(spike.norms)
    for step in range(spike.first - QUIET, spike.first):
        yield StepLine(
            step=step, accepted=step, skipped=False, micro_steps=1,
            loss=spike.losses[0] * draw.lognormvariate(0.0, 0.01), gradient_norm=quiet * draw.lognormvariate(0.0, 0.15),
        )  # fmt: skip
    for step, (norm, loss) in enumerate(zip(spike.norms, spike.losses, strict=True), start=spike.first):
        yield StepLine(step=step, accepted=step, skipped=False, micro_steps=1, loss=loss, gradient_norm=norm)
