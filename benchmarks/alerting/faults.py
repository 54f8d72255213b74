"""What goes wrong in the sick trainings: real mistakes and real failures, each in the one place where it happens."""

from __future__ import annotations

import math
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
