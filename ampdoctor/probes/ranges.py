"""Ranges in a replay: of gradients, activations and weights; flushed gradients; updates too small for bf16."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampdoctor.evidence.run_facts import Place, UpdateFacts
from ampdoctor.hooks.backwards import PLAIN, parameters_of
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.numerics.counting import DeviceCounts, count, count_there, fetched, merged
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.numerics.tensors import Distance, Unseen, blocks, extremes, squares, together
from ampdoctor.probes.modules import GradientHooks, LowPrecisionTensors, optimizer_parameters
from ampdoctor.probes.ops import Probe
from ampdoctor.ranges.profile import Collector, RangeProfile, RunFacts

# -- ranges over a replay --


class RangeProbe(Probe):
    """Histograms of every place, step by step; without a `plan`, everything counts as half.

    `hand_scales` has each step's largest gradient of the backward over that of the optimizer: constant for a loss that
    is scaled by hand, None where either is missing.
    """

    def __init__(self, plan: LowPrecisionTensors | None = None) -> None:
        self._plan = plan
        self._collector = Collector()
        self._attached = False
        self._step: dict[Place, Histogram | DeviceCounts] = {}
        self.counted: Mapping[Place, Histogram] = {}  # of the step that was finished last
        self._stepped: list[Tensor] = []
        self._hooks = GradientHooks(self._on_gradient, on_output=self._on_output, inputs=_inputs(plan))
        self._sizes: Counter[str] = Counter()
        self.hand_scales: list[float | None] = []

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        """Install hooks on modules, parameters and optimizers; the weights are counted once, before the first step."""
        if not self._attached:
            self._attached = True
            self._count_weights(run)
        with ExitStack() as stack:
            stack.enter_context(self._hooks.attach(run))
            for optimizer in run.optimizers.values():
                stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            yield

    def begin(self) -> None:
        self._step = {}
        self._stepped = []
        self._hooks.clear()

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        self.counted = {place: fetched(counts) for place, counts in self._step.items()}
        self._collector.add_step(self.counted)
        delivered = [h.amax for place, h in self.counted.items() if place.kind == "weight_grad" and h.amax is not None]
        stepped = max((abs(float(extreme)) for extreme in self._stepped), default=0.0)
        usable = delivered and 0.0 < stepped < math.inf
        self.hand_scales.append(max(delivered) / stepped if usable else None)
        self._step = {}

    def profile(self, run: RunFacts, **more: Any) -> RangeProfile:
        half = partial(_is_half, self._plan)
        return self._collector.profile(run, half=half, weight=self._sizes.__getitem__, **more)

    def _count_weights(self, run: ObservedRun) -> None:
        names = run.parameter_names()
        for name, module in run.model.named_modules():
            clean = run.module_names.get(name, name)
            self._sizes[clean] = sum(p.numel() for p in module.parameters(recurse=False))
        self._collector.add_weights(
            {
                Place(names[id(parameter)], "weight", "parameter"): count(parameter)
                for parameter in run.model.parameters()
                if parameter.is_floating_point() and not parameter.is_meta
            }
        )

    def _on_gradient(self, place: Place, _ordinal: int, gradient: Tensor) -> None:
        self._count(place, gradient)

    def _on_output(self, name: str, output: Tensor) -> None:
        self._count(Place(name, "activation", "output"), output)

    def _count(self, place: Place, tensor: Tensor) -> None:
        before = self._step.get(place)
        counted = count_there(tensor)
        self._step[place] = counted if before is None else merged(before, counted)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                self._stepped += extremes(parameter.grad)  # read when the step has ended


# -- measured underflow: elements that are zero here and nonzero in the fp32 reference from the same state --

Key = tuple[Place, int]
_REACH = -23
"""log2 of twice fp16's smallest number: a zero whose scaled fp32 value is below it counts as underflow.

A zero whose value is larger has another cause: a sum that cancels, or a gate that the forward in fp16 moved. These were
226 of 297 zeros in one step of a translation model.
"""
_ZERO = -128
_BIAS = 126  # of float32's exponent field; its significands begin at 1, here at 1/2
_LARGEST = 127 + _BIAS


class ReferenceGradients(Probe):
    """One fp32 step's gradients: the exponents of half activation gradients, and the values of weight gradients."""

    def __init__(self, plan: LowPrecisionTensors | None) -> None:
        self.plan = plan
        self.exponents: dict[Key, Tensor] = {}  # int8: a quarter of the memory, enough to find what flushes
        self.weights: dict[Key, Tensor] = {}  # float32, or float64 where the gradient is

    def received(self, run: ObservedRun) -> dict[str, Tensor]:
        """The gradients that the optimizers get, by parameter: the sum over the backwards, before clipping."""
        names = run.parameter_names()
        held = set(map(id, optimizer_parameters(run)))
        wanted = {name for key, name in names.items() if key in held or not run.optimizers}
        summed: dict[str, Tensor] = {}
        for (place, _), gradient in self.weights.items():
            if place.name in wanted:
                before = summed.get(place.name)
                summed[place.name] = gradient if before is None else before + gradient
        return summed

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        """Install hooks, which are made here so that what holds gradients is in no reference cycle."""
        self._hooks = GradientHooks(self._on_gradient, inputs=_inputs(self.plan))
        with self._hooks.attach(run):
            yield
        del self._hooks

    def begin(self) -> None:
        self.exponents.clear()
        self.weights.clear()
        self._hooks.clear()

    def _on_gradient(self, place: Place, ordinal: int, gradient: Tensor) -> None:
        with Unseen(gradient):
            dense = _dense(gradient)
            if place.kind == "weight_grad":
                self.weights[place, ordinal] = dense.to(torch.promote_types(dense.dtype, torch.float32), copy=True)
            elif _is_half(self.plan, place):
                self.exponents[place, ordinal] = _exponents(dense)


@dataclass(slots=True)
class Zeroed:
    """A step's gradients against the reference's; `relative_error` is L2 of all weight gradients, None without any."""

    flushed: Counter[Place] = field(default_factory=Counter)  # zero here; scaled, below twice fp16's smallest number
    nonzero: Counter[Place] = field(default_factory=Counter)  # elements of half gradients, nonzero in the reference
    relative_error: float | None = None

    def add(self, place: Place, flushed: int, present: int) -> None:
        self.flushed[place] += flushed
        self.nonzero[place] += present


class ZeroedProbe(Probe):
    """Compares the gradients of a step with the reference's; `factor` scales a backward's loss beside its scaler."""

    def __init__(self, reference: ReferenceGradients, *, factor: float = 1.0) -> None:
        self._reference = reference
        self._factor = factor
        self._reset()

    def _reset(self) -> None:
        self.zeroed = Zeroed()
        self._counts: list[tuple[Place, Tensor, Tensor]] = []
        self._compared: list[Distance] = []

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        """Install hooks, which are made here as those of the reference are."""
        self._run = run
        self._hooks = GradientHooks(self._on_gradient, inputs=_inputs(self._reference.plan))
        with self._hooks.attach(run):
            yield
        del self._hooks

    def begin(self) -> None:
        self._reset()
        self._hooks.clear()
        self._scale = self._run.events.scale() or PLAIN

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        for place, *counts in self._counts:
            self.zeroed.add(place, *(int(count) for count in counts))
        apart = together(self._compared)
        self.zeroed.relative_error = apart.relative if apart.reference > 0.0 else None
        self._counts.clear()

    def _on_gradient(self, place: Place, ordinal: int, gradient: Tensor) -> None:
        kept = self._reference.weights if place.kind == "weight_grad" else self._reference.exponents
        expected = kept.get((place, ordinal))
        if expected is None or expected.shape != gradient.shape:
            return
        with Unseen(gradient):
            dense = _dense(gradient)
            if place.kind == "weight_grad":
                self._compare(place, dense, expected)
            else:
                nonzero = expected != _ZERO
                gone = (dense == 0).logical_and_(nonzero)
                low = (expected <= _least(self._carried())).logical_and_(gone)
                self._counts.append((place, torch.count_nonzero(low), torch.count_nonzero(nonzero)))

    def _compare(self, place: Place, got: Tensor, expected: Tensor) -> None:
        """Compare a parameter's gradient block by block, so that no tensor of its size is allocated."""
        carried = self._carried()
        apart = Distance(least=math.ldexp(1.0, _least(carried)))
        apart.add(got, expected, scale=carried)
        self._compared.append(apart)
        if _is_half(self._reference.plan, place):
            self.zeroed.add(place, apart.below, apart.nonzero)

    def _carried(self) -> float:
        """The scale of the gradients during the backward; where no scaler scales the loss, the step uses it by hand."""
        backwards = self._run.events.backwards
        scale = (backwards.scale or PLAIN) if backwards.scaled else self._scale
        return scale * self._factor if backwards.inside else scale


def _least(scale: float) -> int:
    """log2 of twice fp16's smallest number, divided by the scale."""
    return _REACH - (math.floor(math.log2(abs(scale))) if 0.0 < abs(scale) < math.inf else 0)


def _exponents(dense: Tensor) -> Tensor:
    """Returns e with 2^(e-1) <= |x| < 2^e in a byte; `_ZERO` for zero.

    Magnitudes from 2^127 on and non-finite values count as the largest, and those below 2^-126 as 2^-127: no scale
    brings either to fp16's smallest number.
    """
    found = torch.empty(dense.shape, dtype=torch.int8, device=dense.device)
    for values, exponents in zip(blocks(dense), blocks(found), strict=True):
        biased = (values.float().view(torch.int32) >> 23).to(torch.uint8)  # drops the sign
        zero = (values == 0).view(torch.uint8)  # brings the least exponent to `_ZERO`; filling by a mask takes longer
        exponents.copy_(biased.clamp_(max=_LARGEST).sub_(_BIAS).sub_(zero, alpha=-_BIAS - _ZERO).view(torch.int8))
    return found


def _is_half(plan: LowPrecisionTensors | None, place: Place) -> bool:
    """Whether the tensor at this place is half in the half-precision run; without a plan, everything counts as half."""
    return plan is None or plan.holds(place)


def _inputs(plan: LowPrecisionTensors | None) -> frozenset[str]:
    return plan.inputs if plan is not None else frozenset()


def _dense(gradient: Tensor) -> Tensor:
    detached = gradient.detach()
    return detached if detached.layout is torch.strided else detached.to_dense()


# -- fp32 updates that bf16 weights would lose, being below half an ulp --

SAMPLED = 1 << 14
"""Elements of a parameter and step whose ratio of update to weight is counted: a random sample, the same in each step.

The share of them below the true median is 1/2 with a standard error of 1/2 / sqrt(2^14) = 0.4 %. So the median of the
sample is the true quantile of 48.4 to 51.6 % (four standard errors), whatever the distribution. Where the logarithms of
the ratios have a normal distribution of two binades, that is 0.08 binades; a bin of the histogram is an eighth.
"""


@dataclass(slots=True)
class _Tally:
    """One parameter's sums over the observed steps."""

    optimizer: str
    steps: int = 0
    elements: int = 0
    updated: int = 0
    stagnant: int = 0
    square: float = 0.0
    lost: float = 0.0
    ratios: Histogram = field(default_factory=Histogram.empty)

    def add(self, before: Tensor, after: Tensor) -> None:
        self.steps += 1
        for old, new in zip(blocks(before), blocks(after), strict=True):
            self._add(old, new)
        old, new = before.reshape(-1), after.detach().reshape(-1)
        if old.numel() > SAMPLED:
            drawn = torch.Generator().manual_seed(0)
            chosen = torch.randint(old.numel(), (SAMPLED,), generator=drawn).to(old.device)
            old, new = old[chosen], new[chosen]
        self.ratios = self.ratios + count((new - old).div_(old))  # where one is 0 it is 0 or not finite

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


class UpdateProbe(Probe):
    """Compares parameters before and after an optimizer's step, in the given steps of an fp32 replay.

    The weight counts as it would be kept in bf16: rounded, then the update is added and the sum rounded again, as by
    torch's own optimizers.
    """

    def __init__(self, steps: Collection[int]) -> None:
        self._wanted = frozenset(steps)
        self._tallies: dict[str, _Tally] = {}

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        """Nothing is installed between steps."""
        self._run = run
        yield

    def during(self, step: int) -> AbstractContextManager[Any]:
        return self._looking() if step in self._wanted else nullcontext()

    def facts(self) -> tuple[UpdateFacts, ...]:
        return tuple(tally.facts(name) for name, tally in sorted(self._tallies.items()))

    @contextmanager
    def _looking(self) -> Iterator[None]:
        everything = self._run.parameter_names()
        own = {everything[id(parameter)] for parameter in self._run.model.parameters()}
        # a parameter that only an optimizer holds is an fp32 master: its updates would not be lost
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
            mine = (p for p in parameters_of(optimizer) if p.dtype == torch.float32 and id(p) in names)
            copies.extend((names[id(p)], p, p.detach().clone()) for p in mine if p.grad is not None)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            while copies:
                name, parameter, copy = copies.pop()
                with Unseen(copy):  # an fp32 replay replaces casts to half; here the cast is needed
                    self._tallies.setdefault(name, _Tally(kind)).add(copy, parameter)

        return before, after
