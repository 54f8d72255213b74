"""The ranges of gradients, activations and weights, summed over the steps of a replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.ranges import SiteRange
from ampdoctor.numerics import Histogram
from ampdoctor.probes.grad_sites import GradientHooks, GradPlace, HalfPlan

if TYPE_CHECKING:
    from torch import Tensor

    from ampdoctor.replay.session import Session

_ORDER = ("activation_grad", "weight_grad", "activation", "weight")


class RangeProbe:
    """Histograms of every place, and the largest magnitude of each step; tensors themselves are never kept.

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
        self._maxima: dict[GradPlace, list[float | None]] = {}
        self._stepped: Histogram = Histogram.empty()
        self._hooks = GradientHooks(
            self._on_gradient, on_output=self._on_output, inputs=plan.inputs if plan is not None else frozenset()
        )
        self._steps = 0
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
            for parameter in session.model.parameters():
                place = GradPlace(names[id(parameter)], "weight", "parameter")
                if parameter.is_floating_point() and not parameter.is_meta:
                    self._total[place] = Histogram.of(parameter)
                    self._maxima[place] = []
        with ExitStack() as stack:
            stack.enter_context(self._hooks.attach(session))
            for optimizer in session.optimizers.values():
                stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            yield

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Forget the last step."""
        self._step = {}
        self._stepped = Histogram.empty()
        self._hooks.clear()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Add the step to the totals.

        A scaler looks at weight gradients only: what is not finite elsewhere may be dropped on its way (by a ReLU).
        """
        for place, counted in self._step.items():
            nonfinite = counted.nans + counted.pos_infs + counted.neg_infs > 0
            series = self._maxima.setdefault(place, [])
            series += [None] * (self._steps - len(series))
            series.append(math.inf if nonfinite and place.kind == "weight_grad" else counted.amax)
            before = self._total.get(place)
            self._total[place] = counted if before is None else before + counted
        self._note_hand_scale()
        self._steps += 1
        self._step = {}

    def sites(self) -> tuple[SiteRange, ...]:
        """Everything that was measured, sorted by kind, name and part."""
        places = sorted(self._total, key=lambda p: (_ORDER.index(p.kind), p.name, p.part))
        return tuple(self._site(place) for place in places)

    def _site(self, place: GradPlace) -> SiteRange:
        owner = place.name.rpartition(".")[0] if place.part == "parameter" else place.name
        return SiteRange(
            name=place.name,
            kind=place.kind,
            part=place.part,
            half=self._plan is None or self._plan.holds(place),
            weight=max(self._sizes.get(owner, 0), 1),
            histogram=self._total[place].to_dict(),
            amax_by_step=tuple(self._maxima.get(place, ())),
        )

    def _on_gradient(self, place: GradPlace, _ordinal: int, gradient: Tensor) -> None:
        self._count(place, gradient)

    def _on_output(self, name: str, output: Tensor) -> None:
        self._count(GradPlace(name, "activation", "output"), output)

    def _count(self, place: GradPlace, tensor: Tensor) -> None:
        before = self._step.get(place)
        counted = Histogram.of(tensor)
        self._step[place] = counted if before is None else before + counted

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._stepped = self._stepped + Histogram.of(parameter.grad)

    def _note_hand_scale(self) -> None:
        delivered = [h.amax for place, h in self._step.items() if place.kind == "weight_grad" and h.amax is not None]
        stepped = self._stepped.amax
        self.hand_scales.append(max(delivered) / stepped if delivered and stepped else None)
