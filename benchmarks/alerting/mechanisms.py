"""The ways to go wrong: each with the first cause that an alert should name, where it lies, and what it is tried on.

All of this was written down before any rule was run on it. First causes are those of the issue: data, gradient,
optimizer, scale, logits, hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.alerting.faults import (
    BadBatches,
    Dark,
    Decay,
    Drift,
    FixedScale,
    GarbledReduction,
    Labels,
    LostMoments,
    LowMoments,
    LowWeights,
    NeverZeroed,
    Ratchet,
    Rate,
    Repeats,
    StaleAmax,
    StuckBit,
    Summed,
    Unclipped,
)
from benchmarks.alerting.loop import Fault

Make = Callable[[Random, int], Fault]
"""Of a draw and the training's steps."""


@dataclass(frozen=True)
class Mechanism:
    """A way to go wrong.

    Attributes:
        cause: The first cause that an alert should name; the issue's words. Several, where more than one is right.
        tasks: What it is tried on, one training each; with the precision behind a colon.
        make: The fault, drawn.
        layers: Where it lies, as a pattern for names of parameters; "" where it lies everywhere or nowhere.
        own: What names the parameters that are a group of their own, in the twin as well.
        rate: What the task's learning rates are multiplied by, in the twin as well.
        halves: Steps after which the loss is half as large, in the twin as well: a mean over ever more tokens, which an
            Adam of short memory does not mind; 0 for a loss that stays as it is.
    """

    cause: tuple[str, ...]
    tasks: tuple[str, ...]
    make: Make
    layers: str = ""
    own: str = ""
    rate: float = 1.0
    halves: int = 0


def _late(draw: Random, steps: int) -> int:
    """An onset when the twin has found its way."""
    return draw.randrange(int(0.4 * steps), int(0.55 * steps))


MECHANISMS: dict[str, Mechanism] = {
    "attention logits grow": Mechanism(
        ("logits",), ("text",) * 3,
        lambda d, n: Rate(_late(d, n), d.choice([300.0, 600.0]), over=200, group=1),
        layers=r"attention\.(query|key)|attention$", own=r"query|key",
    ),
    "learning rate too high": Mechanism(
        ("optimizer",), ("classify", "text", "images"),
        lambda d, _: Rate(d.randrange(20, 60), d.choice([30.0, 60.0]), over=d.choice([250, 400])),
    ),
    "schedule jumps": Mechanism(
        ("optimizer",), ("classify", "reconstruct", "text"),
        lambda d, n: Rate(_late(d, n), d.choice([50.0, 100.0])),
    ),
    "restart without warm-up": Mechanism(
        ("optimizer",), ("series", "experts", "images"),
        lambda d, n: Rate(_late(d, n), d.choice([30.0, 60.0]), lasts=d.choice([30, 60])),
    ),
    "bad batch late": Mechanism(
        ("data",), ("series", "reconstruct", "experts", "values", "classify", "images"),
        lambda d, n: BadBatches(_late(d, n), d.choice([100.0, 300.0]), d.choice([1, 1, 2])),
    ),
    "inputs not normalised": Mechanism(
        ("data",), ("classify", "reconstruct", "experts"),
        lambda d, n: BadBatches(_late(d, n), d.choice([5.0, 15.0, 40.0]), 10**9),
    ),
    "label corruption": Mechanism(
        ("data",), ("classify", "images", "text", "reconstruct"),
        lambda d, n: Labels(_late(d, n), d.choice([0.7, 1.0]), d.choice([1, 100, 200])),
    ),
    "data repeat": Mechanism(
        ("data",), ("classify", "text", "experts"),
        lambda d, n: Repeats(_late(d, n), d.choice([1, 2, 3])),
    ),
    "files fail to load": Mechanism(
        ("data",), ("classify", "images", "series"),
        lambda d, n: Dark(_late(d, n), 1.0, d.choice([120, 200])),
    ),
    "weight decay of the wrong sign": Mechanism(
        ("optimizer",), ("classify", "text", "reconstruct"),
        lambda d, n: Decay(_late(d, n), -d.choice([0.006, 0.01, 0.015])),
    ),
    "weight decay on norm gains": Mechanism(
        ("optimizer",), ("classify", "text", "classify"),
        lambda d, n: Decay(_late(d, n), d.choice([0.01, 0.015]), group=1),
        layers="norm", own="norm",
    ),
    "weight decay too strong": Mechanism(
        ("optimizer",), ("images", "series", "pairs"),
        lambda d, n: Decay(_late(d, n), d.choice([0.004, 0.008])),
    ),
    "second moments flushed": Mechanism(
        ("optimizer",), ("reconstruct", "classify", "experts"),
        lambda d, n: LowMoments(_late(d, n)),
    ),
    "second moments lost": Mechanism(
        ("optimizer",), ("classify", "series", "reconstruct"),
        lambda d, n: LostMoments(_late(d, n)),
    ),
    "updates lost in bf16": Mechanism(
        ("optimizer",), ("classify", "reconstruct", "experts"),
        lambda *_: LowWeights(0),
        rate=0.15,
    ),
    "gradients never zeroed": Mechanism(
        ("gradient",), ("classify", "images", "reconstruct"),
        lambda d, n: NeverZeroed(_late(d, n)),
    ),
    "gradients summed, not averaged": Mechanism(
        ("gradient",), ("images",) * 3,
        lambda d, n: Summed(_late(d, n), d.choice([16, 32, 64])),
    ),
    "recurrent weights": Mechanism(
        ("gradient", "optimizer"), ("series:relu", "series:relu", "series:tanh"),
        lambda d, n: Unclipped(_late(d, n), d.choice([10.0, 20.0])),
        layers="weight_hh", own="weight_hh",
    ),
    "underflow creeping in": Mechanism(
        ("scale", "gradient"), ("text:fp16",) * 3,
        lambda d, _: FixedScale(2.0 ** d.choice([-4, -3, -2])),
        rate=0.4, halves=25,
    ),
    "scale ratchet": Mechanism(
        ("scale",), ("classify:fp16", "reconstruct:fp16", "text:fp16"),
        lambda d, n: Ratchet(_late(d, n) - n // 4, d.choice([2, 3, 4]), "weight"),
    ),
    "fp8 amax drifts": Mechanism(
        ("scale",), ("classify:fp8", "reconstruct:fp8", "text:fp8"),
        lambda d, n: StaleAmax(_late(d, n), d.choice([0.98, 0.985])),
    ),
    "logit scale": Mechanism(
        ("logits",), ("pairs",) * 3,
        lambda d, n: Decay(_late(d, n), -d.choice([0.004, 0.008]), group=1),
        layers="logit_scale", own="logit_scale",
    ),
    "moving average drifts": Mechanism(
        ("data", "logits"), ("values",) * 3,
        lambda d, n: Drift(_late(d, n), d.choice([1.2, 1.35, 1.5])),
    ),
    "bit stuck": Mechanism(
        ("hardware",),
        ("classify", "text", "reconstruct"),
        lambda d, n: StuckBit(_late(d, n), "weight", d.choice([25, 26]), d.choice([4, 8])),
    ),
    "reduction garbled": Mechanism(
        ("hardware", "gradient"), ("images", "images", "series"),
        lambda d, n: GarbledReduction(_late(d, n), "weight", d.choice([30.0, 100.0]), d.choice([3, 8])),
    ),
}  # fmt: skip
