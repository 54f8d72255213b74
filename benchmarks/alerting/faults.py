"""What goes wrong in the sick trainings: real mistakes and real failures, each in the one place where it happens.

`MECHANISMS` names each with the first cause that an alert should name, where it lies, and the tasks it is tried on.
These were written down before any rule was run on them. First causes are those of the issue: data, gradient, optimizer,
scale, logits, hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from benchmarks.alerting.loop import Batch, Fault, Run
from benchmarks.alerting.nets import Fp8Linear


class Rate(Fault):
    """The learning rate of a group is multiplied: at once, or more with every step."""

    def __init__(
        self, onset: int, factor: float, *, over: int = 1, group: int | None = None, lasts: int = 10**9
    ) -> None:
        super().__init__(onset)
        self.factor, self.over, self.group, self.lasts = factor, over, group, lasts

    def before(self, run: Run, step: int) -> None:
        so_far = min((step - self.onset + 1) / self.over, 1.0)
        groups = run.optimizer.param_groups
        for group in groups if self.group is None else [groups[self.group]]:
            if step < self.onset + self.lasts:
                group["lr"] *= self.factor**so_far


class Decay(Fault):
    """The weight decay of a group is another one: so much of a weight is lost in a step, at the full learning rate."""

    def __init__(self, onset: int, share: float, group: int | None = None) -> None:
        super().__init__(onset)
        self.share, self.group = share, group

    def before(self, run: Run, step: int) -> None:
        groups = list(zip(run.optimizer.param_groups, run.rates, strict=True))
        for group, rate in groups if self.group is None else [groups[self.group]]:
            group["weight_decay"] = self.share / rate


class BadBatches(Fault):
    """One batch, or a few, or all from now on, whose inputs nobody has normalised: another mean and another unit."""

    def __init__(self, onset: int, factor: float, batches: int = 1) -> None:
        super().__init__(onset)
        self.factor, self.batches = factor, batches

    def batch(self, run: Run, step: int, batch: Batch) -> Batch:
        if step >= self.onset + self.batches:
            return batch
        return self.factor * (batch[0] + 1.0), *batch[1:]


class Labels(Fault):
    """A growing share of targets belongs to another input: a shuffled join of the two files."""

    def __init__(self, onset: int, share: float, over: int) -> None:
        super().__init__(onset)
        self.share, self.over = share, over

    def batch(self, run: Run, step: int, batch: Batch) -> Batch:
        share = self.share * min((step - self.onset + 1) / self.over, 1.0)
        wrong = round(share * len(batch[1]))
        targets = batch[1].clone()
        targets[:wrong] = batch[1][:wrong].roll(1, 0)
        return batch[0], targets


class Repeats(Fault):
    """The loader gives the same few batches again and again: a sampler that is seeded anew with every shard."""

    def __init__(self, onset: int, batches: int) -> None:
        super().__init__(onset)
        self.batches = batches

    def batch(self, run: Run, step: int, batch: Batch) -> Batch:
        return run.batch(self.onset + (step - self.onset) % self.batches)


class Dark(Fault):
    """More and more inputs are all zeros: a store whose files fail to load."""

    def __init__(self, onset: int, share: float, over: int) -> None:
        super().__init__(onset)
        self.share, self.over = share, over

    def batch(self, run: Run, step: int, batch: Batch) -> Batch:
        dark = round(self.share * min((step - self.onset + 1) / self.over, 1.0) * len(batch[0]))
        inputs = batch[0].clone()
        inputs[:dark] = 0.0
        return inputs, *batch[1:]


class NeverZeroed(Fault):
    """`zero_grad` has slipped into a branch that is not taken."""

    def zeroes(self, step: int) -> bool:
        return False


class Summed(Fault):
    """The micro-batches' gradients are summed where they were averaged."""

    def __init__(self, onset: int, micro_batches: int) -> None:
        super().__init__(onset)
        self.micro_batches = micro_batches

    def gradients(self, run: Run, step: int) -> None:
        for parameter in run.model.parameters():
            parameter.grad.mul_(self.micro_batches)  # type: ignore[union-attr]  # after a backward


class Unclipped(Fault):
    """Clipping is lost, and sequences' gradients grow with the recurrent weights."""

    def __init__(self, onset: int, rate: float) -> None:
        super().__init__(onset)
        self.rate = rate

    def before(self, run: Run, step: int) -> None:
        run.clip = None
        run.optimizer.param_groups[-1]["lr"] *= self.rate


class LowMoments(Fault):
    """Adam's second moments are kept in fp16 from a resume on: small ones are flushed to zero."""

    def after(self, run: Run, step: int) -> None:
        for state in run.optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].half())


class LostMoments(Fault):
    """A resume loses Adam's second moments, and keeps its first and the count of steps."""

    def before(self, run: Run, step: int) -> None:
        if step == self.onset:
            for state in run.optimizer.state.values():
                state["exp_avg_sq"].zero_()


class LowWeights(Fault):
    """The weights themselves are bf16, without masters: updates of less than 2^-9 of a weight are lost."""

    def begin(self, run: Run) -> None:
        run.model.bfloat16()
        loss = run.loss

        def rounded(batch: Batch) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(tuple(b.bfloat16() if b.is_floating_point() else b for b in batch)).float()

        run.loss = rounded


class FixedScale(Fault):
    """The loss scale is what somebody once wrote into the script, and never grows."""

    def __init__(self, scale: float) -> None:
        super().__init__(0)
        self.scale = scale

    def begin(self, run: Run) -> None:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=10**9)


class Ratchet(Fault):
    """Now and then a sample's gradient is infinite at any scale; each time the scale is halved, and it grows slowly."""

    def __init__(self, onset: int, every: int, tensor: str) -> None:
        super().__init__(onset)
        self.every, self.tensor = every, tensor

    def gradients(self, run: Run, step: int) -> None:
        if (step - self.onset) % self.every == 0:
            for _, parameter in run.named(self.tensor)[:1]:
                parameter.grad.view(-1)[0] = math.inf  # type: ignore[union-attr]  # after a backward


class Drift(Fault):
    """A moving average adds more than it takes away, so that what is learned from it runs ahead of itself."""

    def __init__(self, onset: int, gain: float) -> None:
        super().__init__(onset)
        self.gain = gain

    def before(self, run: Run, step: int) -> None:
        average: Any = run.average  # type: ignore[attr-defined]  # the task's
        average.gain = (1 - average.decay) * self.gain


class StaleAmax(Fault):
    """FP8's history of maxima is kept no longer, and the activations outgrow the scale that it gave."""

    def __init__(self, onset: int, growth: float) -> None:
        super().__init__(onset)
        self.growth = growth

    def before(self, run: Run, step: int) -> None:
        for module in run.model.modules():
            if isinstance(module, Fp8Linear):
                module.follows = False
                module.amax.mul_(self.growth)


class StuckBit(Fault):
    """A bit of the exponent is read as 1 in some rows of a weight: a lane of the memory has failed for a moment."""

    def __init__(self, onset: int, tensor: str, bit: int, rows: int) -> None:
        super().__init__(onset)
        self.tensor, self.bit, self.rows = tensor, bit, rows

    @torch.no_grad()
    def before(self, run: Run, step: int) -> None:
        if step == self.onset:
            rows = run.named(self.tensor)[0][1][: self.rows]
            rows.copy_((rows.contiguous().view(torch.int32) | (1 << self.bit)).view(torch.float32))


class GarbledReduction(Fault):
    """One tensor's gradient comes back from its reduction as something else, some steps in a row."""

    def __init__(self, onset: int, tensor: str, factor: float, steps: int) -> None:
        super().__init__(onset)
        self.tensor, self.factor, self.steps = tensor, factor, steps

    def gradients(self, run: Run, step: int) -> None:
        if step < self.onset + self.steps:
            for _, parameter in run.named(self.tensor)[:1]:
                gradient = parameter.grad
                assert gradient is not None
                size = self.factor * gradient.norm() / math.sqrt(gradient.numel())
                gradient.copy_(size * torch.ones_like(gradient) * (1 - 2 * (gradient < 0).float()).flip(0))


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
