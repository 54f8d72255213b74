"""Elements that are zero here and not in the fp32 reference from the same state: underflow as it really happens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.of_runs.ranges import Place
from ampdoctor.hooks.backwards import PLAIN
from ampdoctor.numerics import Distance
from ampdoctor.numerics.tensors import Unseen, blocks
from ampdoctor.probes.measures.grad_sites import GradientHooks, HalfPlan

if TYPE_CHECKING:
    from torch import Tensor

    from ampdoctor.hooks.interfaces import Watched

Key = tuple[Place, int]

_REACH = -23
"""log2 of twice fp16's smallest number. A zero where the scaled value is below it is the range's doing, give or take
the rounding of what it is made of. One where it is larger comes from elsewhere, a sum that cancels or a gate that the
forward in fp16 moved: 226 of 297 zeros in one step of a translation model."""
_ZERO = -128
_BIAS = 126
"""Of float32's exponent field, whose significands begin at 1, and here at 1/2."""
_LARGEST = 127 + _BIAS


class ReferenceGradients:
    """One fp32 step's gradients: the exponents of half activation gradients, and the values of weight gradients.

    Args:
        plan: What has the half format in the half-precision run; None: everything.

    Attributes:
        exponents: int8, by place and ordinal: a quarter of the memory, and enough to tell what flushes.
        weights: float32, or float64 where the gradient is.
    """

    def __init__(self, plan: HalfPlan | None) -> None:
        self.plan = plan
        self.exponents: dict[Key, Tensor] = {}
        self.weights: dict[Key, Tensor] = {}

    @property
    def half(self) -> frozenset[Key]:
        """What is half in the half-precision run."""
        return frozenset(key for key in (*self.exponents, *self.weights) if self.holds(key[0]))

    def holds(self, place: Place) -> bool:
        """Is the tensor at this place half in the half-precision run?"""
        return self.plan is None or self.plan.holds(place)

    def received(self, run: Watched) -> dict[str, Tensor]:
        """Returns what the optimizers get, by parameter: the sum over backwards where nothing else is done to it."""
        names = run.parameter_names()
        held = {id(p) for optimizer in run.optimizers.values() for g in optimizer.param_groups for p in g["params"]}
        wanted = {name for key, name in names.items() if key in held or not run.optimizers}
        summed: dict[str, Tensor] = {}
        for (place, _), gradient in self.weights.items():
            if place.name in wanted:
                before = summed.get(place.name)
                summed[place.name] = gradient if before is None else before + gradient
        return summed

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks are in place inside; they are made here, so that what holds gradients is in no circle of references."""
        self._hooks = GradientHooks(self._on_gradient, inputs=_inputs(self.plan))
        with self._hooks.attach(run):
            yield
        del self._hooks

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Forget the last step."""
        self.exponents.clear()
        self.weights.clear()
        self._hooks.clear()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:
        """Nothing is read here."""

    def _on_gradient(self, place: Place, ordinal: int, gradient: Tensor) -> None:
        with Unseen(gradient):
            dense = _dense(gradient)
            if place.kind == "weight_grad":
                self.weights[place, ordinal] = dense.to(torch.promote_types(dense.dtype, torch.float32), copy=True)
            elif self.holds(place):
                self.exponents[place, ordinal] = _exponents(dense)


@dataclass(slots=True)
class Zeroed:
    """What a step's gradients are beside those of the reference.

    Attributes:
        flushed: By place: elements of half gradients that are zero here and, scaled, were below twice fp16's smallest
            number in the reference.
        vanished: By place: elements that are zero here though they were larger: a gate that the forward's rounding
            moved, a sum that cancels, what flushed before it.
        nonzero: By place: elements of half gradients that are not zero in the reference.
        relative_error: L2 norm of the difference of all weight gradients over the reference's; None for none, not
            finite where a gradient is not.
        unmatched: Gradients that the reference had and this step had not, or of another shape.
    """

    flushed: Counter[Place] = field(default_factory=Counter)
    vanished: Counter[Place] = field(default_factory=Counter)
    nonzero: Counter[Place] = field(default_factory=Counter)
    relative_error: float | None = None
    unmatched: int = 0

    def add(self, place: Place, flushed: int, gone: int, present: int) -> None:
        """Count elements of one place; `gone` are all that are zero here and not in the reference."""
        self.flushed[place] += flushed
        self.vanished[place] += gone - flushed
        self.nonzero[place] += present


class ZeroedProbe:
    """Compares the gradients of a step with those of the reference.

    Args:
        reference: Filled by a replay of the same step from the same state.
        factor: By which a backward's loss is scaled here beyond what its scaler does; what the step asks for outside
            of a backward does not carry it.

    Attributes:
        zeroed: Of the step that was finished last.
    """

    def __init__(self, reference: ReferenceGradients, *, factor: float = 1.0) -> None:
        self._reference = reference
        self._factor = factor
        self._reset()

    def _reset(self) -> None:
        self.zeroed = Zeroed()
        self._seen: set[Key] = set()
        self._counts: list[tuple[Place, Tensor, Tensor, Tensor]] = []
        self._error = self._norm = 0.0

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks are in place inside, and made here as those of the reference are."""
        self._run = run
        self._hooks = GradientHooks(self._on_gradient, inputs=_inputs(self._reference.plan))
        with self._hooks.attach(run):
            yield
        del self._hooks

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Forget the last step, and note its loss scale."""
        self._reset()
        self._hooks.clear()
        self._scale = self._run.events.scale() or PLAIN
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Read the counts."""
        for place, *counts in self._counts:
            self.zeroed.add(place, *(int(count) for count in counts))
        self.zeroed.unmatched = len(self._reference.half - self._seen)
        if self._norm > 0.0:
            self.zeroed.relative_error = math.sqrt(self._error / self._norm) if self._error >= 0.0 else math.nan
        self._counts.clear()

    def _on_gradient(self, place: Place, ordinal: int, gradient: Tensor) -> None:
        key = place, ordinal
        kept = self._reference.weights if place.kind == "weight_grad" else self._reference.exponents
        expected = kept.get(key)
        if expected is None or expected.shape != gradient.shape:
            return
        self._seen.add(key)
        with Unseen(gradient):
            dense = _dense(gradient)
            if place.kind == "weight_grad":
                self._compare(place, dense, expected)
            else:
                nonzero = expected != _ZERO
                gone = (dense == 0).logical_and_(nonzero)
                low = (expected <= _least(self._carried())).logical_and_(gone)
                counts = torch.count_nonzero(low), torch.count_nonzero(gone), torch.count_nonzero(nonzero)
                self._counts.append((place, *counts))

    def _compare(self, place: Place, got: Tensor, expected: Tensor) -> None:
        """Compare a parameter's gradient, block by block: the sums are small, and nothing of its size is made."""
        carried = self._carried()
        apart = Distance(least=math.ldexp(1.0, _least(carried)))
        apart.add(got, expected, scale=carried)
        self._error += apart.error
        self._norm += apart.reference
        if self._reference.holds(place):
            self.zeroed.add(place, apart.below, apart.flushed, apart.nonzero)

    def _carried(self) -> float:
        """The scale of the gradients on their way; where no scaler ever scales a loss, a step does by hand with it."""
        backwards = self._run.events.backwards
        scale = (backwards.scale or PLAIN) if backwards.scaled else self._scale
        return scale * self._factor if backwards.inside else scale


def _least(scale: float) -> int:
    """Returns log2 of the smallest magnitude that fp16 holds surely under the scale."""
    return _REACH - (math.floor(math.log2(abs(scale))) if 0.0 < abs(scale) < math.inf else 0)


def _exponents(dense: Tensor) -> Tensor:
    """Returns e with 2^(e-1) <= |x| < 2^e in a byte; `_ZERO` for zero.

    Magnitudes from 2^127 on, and what is not finite, count as the largest, and those below 2^-126 as 2^-127: no scale
    brings either to fp16's smallest number.
    """
    found = torch.empty(dense.shape, dtype=torch.int8, device=dense.device)
    for values, exponents in zip(blocks(dense), blocks(found), strict=True):
        biased = (values.float().view(torch.int32) >> 23).to(torch.uint8)  # which drops the sign
        exponents.copy_(biased.clamp_(max=_LARGEST).sub_(_BIAS).view(torch.int8))
        exponents.masked_fill_(values == 0, _ZERO)
    return found


def _inputs(plan: HalfPlan | None) -> frozenset[str]:
    return plan.inputs if plan is not None else frozenset()


def _dense(gradient: Tensor) -> Tensor:
    detached = gradient.detach()
    return detached if detached.layout is torch.strided else detached.to_dense()
