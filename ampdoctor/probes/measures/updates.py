"""What bf16 weights would make of an optimizer's fp32 updates: which of them are below half an ulp."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.of_runs.modules import UpdateFacts
from ampdoctor.numerics import Histogram
from ampdoctor.numerics.tensors import Unseen, blocks, squares

if TYPE_CHECKING:
    from torch import Tensor

    from ampdoctor.hooks.interfaces import Watched

SAMPLED = 1 << 14
"""Elements of a parameter and step whose ratio of update to weight is counted, drawn at random, the same in each step.
The share of them below the true median is 1/2 with a standard error of 1/2 / sqrt(2^14) = 0.4 %: the median of the
sample is the true quantile of 48.4 to 51.6 % (four standard errors), whatever the distribution. Where the logarithms
of the ratios are spread like a normal distribution of two binades, that is 0.08 binades; a bin of the histogram is an
eighth."""


@dataclass(slots=True)
class _Tally:
    """One parameter's sums over the steps that were looked at."""

    optimizer: str
    steps: int = 0
    elements: int = 0
    updated: int = 0
    stagnant: int = 0
    square: float = 0.0
    lost: float = 0.0
    ratios: Histogram = field(default_factory=Histogram.empty)

    def add(self, before: Tensor, after: Tensor) -> None:
        """Count one step of the parameter, both tensors fp32 of the same shape."""
        self.steps += 1
        for old, new in zip(blocks(before), blocks(after), strict=True):
            self._add(old, new)
        old, new = before.reshape(-1), after.detach().reshape(-1)
        if old.numel() > SAMPLED:
            drawn = torch.Generator().manual_seed(0)
            chosen = torch.randint(old.numel(), (SAMPLED,), generator=drawn).to(old.device)
            old, new = old[chosen], new[chosen]
        self.ratios = self.ratios + Histogram.of((new - old).div_(old))  # where one is 0 it is 0 or not finite

    def _add(self, before: Tensor, after: Tensor) -> None:
        update, kept = after - before, before.bfloat16()
        moved = (kept + update).bfloat16()
        off = moved.float().sub_(kept).sub_(update)
        square, lost = squares(update), squares(off)
        if not math.isfinite(square + lost):
            finite = torch.isfinite(update) & torch.isfinite(moved)
            if not bool(finite.all()):
                self._add(before[finite], after[finite])
                return
        self.elements += before.numel()
        updated = int(torch.count_nonzero(update))
        self.updated += updated
        self.stagnant += int((moved == kept).sum()) - (before.numel() - updated)
        self.square += square
        self.lost += lost

    def facts(self, name: str) -> UpdateFacts:
        """The sums as evidence."""
        median = self.ratios.quantile(0.5)
        return UpdateFacts(
            name=name,
            optimizer=self.optimizer,
            steps=self.steps,
            elements=self.elements,
            updated=self.updated / self.elements if self.elements else 0.0,
            stagnant=self.stagnant / self.updated if self.updated else 0.0,
            size=math.sqrt(self.square),
            lost=math.sqrt(self.lost / self.square) if self.square else 0.0,
            log2_ratio=math.log2(median) if median else None,
        )


class UpdateProbe:
    """Compares parameters before and after an optimizer's step; for a replay in fp32 (`Session.reference`).

    The weight counts as it would be kept in bf16: rounded, then the update added and the sum rounded again, as torch's
    own optimizers do with bf16 parameters. An optimizer's step is seen whole, weight decay and update in one.

    Args:
        steps: Which steps to look at. In the others nothing is hooked and nothing copied.
    """

    def __init__(self, steps: Collection[int]) -> None:
        self._wanted = frozenset(steps)
        self._tallies: dict[str, _Tally] = {}

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Nothing is in place between steps."""
        self._run = run
        yield

    def during(self, step: int) -> AbstractContextManager[Any]:
        """Hooks on the optimizers, in a step that is wanted."""
        return self._looking() if step in self._wanted else nullcontext()

    def finish(self, step: int, loss: Any) -> None:
        """Everything was counted when the optimizers had stepped."""

    def facts(self) -> tuple[UpdateFacts, ...]:
        """Each parameter that an optimizer stepped in fp32, by name."""
        return tuple(tally.facts(name) for name, tally in sorted(self._tallies.items()))

    @contextmanager
    def _looking(self) -> Iterator[None]:
        everything = self._run.parameter_names()
        own = {everything[id(parameter)] for parameter in self._run.model.parameters()}
        # what only an optimizer holds is an fp32 master that the run keeps by hand: nothing of it would be lost
        names = {key: name for key, name in everything.items() if name in own}
        with ExitStack() as stack:
            for optimizer in self._run.optimizers.values():
                before, after = self._hooks(names)
                stack.callback(optimizer.register_step_pre_hook(before).remove)
                stack.callback(optimizer.register_step_post_hook(after).remove)
            yield

    def _hooks(self, names: dict[int, str]) -> tuple[Callable[..., None], Callable[..., None]]:
        copies: list[tuple[str, Tensor, Tensor]] = []

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            copies.clear()
            moving = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            mine = (p for p in moving if p.dtype == torch.float32 and id(p) in names)
            copies.extend((names[id(p)], p, p.detach().clone()) for p in mine)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            while copies:
                name, parameter, copy = copies.pop()
                with Unseen(copy):  # an fp32 replay makes written casts to half wide, and here one is meant
                    self._tallies.setdefault(name, _Tally(kind)).add(copy, parameter)

        return before, after
