"""The ranges of gradients, activations and weights, step by step and summed over a replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ampdoctor.evidence.ranges import GRADIENTS, KINDS, Site
from ampdoctor.numerics import Histogram, extremes
from ampdoctor.numerics.curves import flushed_counts, powers, scaled_to_fit, squared_errors
from ampdoctor.probes.grad_sites import GradientHooks, GradPlace, HalfPlan
from ampdoctor.ranges.profile import EXPONENTS, FP8, RangeProfile, RunFacts, Series

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ampdoctor.replay.session import Session

_AT_ONCE = 512
"""Sites whose histograms are dense at the same time: 16 KiB each."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step came to, for the places seen in it."""

    places: tuple[GradPlace, ...]
    amax: NDArray[np.float64]
    nonzero: NDArray[np.int64]
    power: NDArray[np.float64]
    flushed: NDArray[np.float32]
    error: NDArray[np.float32]


class RangeProbe:
    """Histograms of every place, and each step's maxima and curves by loss scale; tensors themselves are never kept.

    On a device the counting does not wait for it; the step's histograms are read when the step has ended.

    Args:
        plan: What has the half format in the half-precision run; None where that is not known: then everything counts
            as half.

    Attributes:
        hand_scales: For each step the factor between the gradients that the backward delivers and those that the
            optimizer gets (their largest magnitudes); None where either is missing. A constant one is a loss scaled by
            hand.
    """

    def __init__(self, plan: HalfPlan | None = None) -> None:
        self._plan = plan
        self._step: dict[GradPlace, Histogram] = {}
        self._total: dict[GradPlace, Histogram] = {}
        self._fp8: dict[GradPlace, NDArray[np.float64]] = {}
        self._power: dict[GradPlace, float] = {}
        self._order: dict[GradPlace, int] = {}
        self._steps: list[_Step] = []
        self._stepped: list[Tensor] = []
        self._hooks = GradientHooks(
            self._on_gradient, on_output=self._on_output, inputs=plan.inputs if plan is not None else frozenset()
        )
        self._sizes: dict[str, int] = {}
        self.hand_scales: list[float | None] = []

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        """Hooks on modules, parameters and optimizers; the weights are counted once, before the first step."""
        names = session.parameter_names()
        for name, module in session.model.named_modules():
            clean = session.module_names.get(name, name)
            self._sizes[clean] = sum(p.numel() for p in module.parameters(recurse=False))
        if not self._total:
            weights = {
                GradPlace(names[id(parameter)], "weight", "parameter"): Histogram.of(parameter)
                for parameter in session.model.parameters()
                if parameter.is_floating_point() and not parameter.is_meta
            }
            self._add(weights)
        with ExitStack() as stack:
            stack.enter_context(self._hooks.attach(session))
            for optimizer in session.optimizers.values():
                stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            yield

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Forget the last step."""
        self._step = {}
        self._stepped = []
        self._hooks.clear()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Add the step to the totals.

        A scaler looks at weight gradients only: what is not finite elsewhere may be dropped on its way (by a ReLU).
        """
        for place in self._step:
            self._order.setdefault(place, len(self._order))
        self._steps.append(self._add(self._step))
        self._note_hand_scale()
        self._step = {}

    def profile(self, run: RunFacts, **more: Any) -> RangeProfile:
        """Everything that was measured; sites are sorted by kind, name and part.

        Args:
            run: Facts of the run.
            more: Further fields of the profile.
        """
        places = sorted(self._total, key=lambda p: (KINDS.index(p.kind), p.name, p.part))
        gradients = sum(place.kind in GRADIENTS for place in places)
        where = {place: index for index, place in enumerate(places)}
        steps, scales = len(self._steps), len(EXPONENTS)
        series = Series(
            amax=np.zeros((steps, len(places))),
            nonzero=np.zeros((steps, gradients), dtype=np.int64),
            power=np.zeros((steps, gradients)),
            flushed=np.zeros((steps, gradients, scales), dtype=np.float32),
            error=np.zeros((steps, gradients, scales), dtype=np.float32),
        )
        for row, step in enumerate(self._steps):
            columns = np.array([where[place] for place in step.places], dtype=np.intp)
            series.amax[row, columns] = step.amax
            inside = columns < gradients
            for whole, part in (
                (series.nonzero, step.nonzero),
                (series.power, step.power),
                (series.flushed, step.flushed),
                (series.error, step.error),
            ):
                whole[row, columns[inside]] = part
        return RangeProfile(
            run=run,
            sites=tuple(self._site(place) for place in places),
            histograms=tuple(self._total[place] for place in places),
            series=series,
            fp8=np.array([self._fp8[place] for place in places]).reshape(len(places), len(FP8), 3),
            square_sums=np.array([self._power[place] for place in places]),
            **more,
        )

    def _site(self, place: GradPlace) -> Site:
        owner = place.name.rpartition(".")[0] if place.part == "parameter" else place.name
        return Site(
            name=place.name,
            kind=place.kind,
            part=place.part,
            half=self._plan is None or self._plan.holds(place),
            weight=max(self._sizes.get(owner, 0), 1),
            order=self._order.get(place, 0),
        )

    def _on_gradient(self, place: GradPlace, _ordinal: int, gradient: Tensor) -> None:
        self._count(place, gradient)

    def _on_output(self, name: str, output: Tensor) -> None:
        self._count(GradPlace(name, "activation", "output"), output)

    def _count(self, place: GradPlace, tensor: Tensor) -> None:
        before = self._step.get(place)
        counted = Histogram.of(tensor)
        self._step[place] = counted if before is None else before + counted

    def _add(self, counted: dict[GradPlace, Histogram]) -> _Step:
        """Add histograms to the totals, and return the figures of this step; of gradients the curves too."""
        for place, histogram in counted.items():
            before = self._total.get(place)
            self._total[place] = histogram if before is None else before + histogram
        gradients = [place for place in counted if place.kind in GRADIENTS]
        others = [place for place in counted if place.kind not in GRADIENTS]
        places = (*gradients, *others)
        curves = []
        for begin in range(0, len(places), _AT_ONCE):
            part = places[begin : begin + _AT_ONCE]
            curves.append(self._figures(part, [counted[place] for place in part]))
        empty = np.zeros(0, dtype=np.int64), np.zeros(0), *(np.zeros((0, len(EXPONENTS))),) * 2
        nonzero, power, flushed, error = (
            np.concatenate(blocks)[: len(gradients)] for blocks in zip(empty, *curves, strict=True)
        )
        amax = np.array([_largest(place, counted[place]) for place in places])
        return _Step(
            places, amax, nonzero.astype(np.int64), power, flushed.astype(np.float32), error.astype(np.float32)
        )

    def _figures(
        self, places: tuple[GradPlace, ...], histograms: list[Histogram]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        counts = np.stack([histogram.counts.reshape(-1) for histogram in histograms])
        nonzero, power = counts.sum(axis=1), powers(counts)
        amax = np.array([histogram.amax or 0.0 for histogram in histograms])
        fitted = np.stack([scaled_to_fit(counts, amax, fmt) for fmt in FP8], axis=1)
        for index, place in enumerate(places):
            self._fp8[place] = self._fp8.get(place, 0.0) + fitted[index]
            self._power[place] = self._power.get(place, 0.0) + float(power[index])
        present = np.maximum(nonzero, 1)[:, None]
        flushed = flushed_counts(counts, "fp16", EXPONENTS) / present
        squared = squared_errors(counts, "fp16", EXPONENTS)
        error = np.sqrt(np.divide(squared, power[:, None], out=np.zeros_like(squared), where=power[:, None] > 0.0))
        return nonzero, power, flushed, error

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._stepped += extremes(parameter.grad)  # read when the step has ended

    def _note_hand_scale(self) -> None:
        delivered = [h.amax for place, h in self._step.items() if place.kind == "weight_grad" and h.amax is not None]
        stepped = max((abs(float(extreme)) for extreme in self._stepped), default=0.0)
        usable = delivered and 0.0 < stepped < math.inf
        self.hand_scales.append(max(delivered) / stepped if usable else None)


def _largest(place: GradPlace, counted: Histogram) -> float:
    nonfinite = counted.nans + counted.pos_infs + counted.neg_infs > 0
    return math.inf if nonfinite and place.kind == "weight_grad" else counted.amax or 0.0
