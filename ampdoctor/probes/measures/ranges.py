"""The ranges of gradients, activations and weights over a replay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.of_runs.ranges import Place
from ampdoctor.numerics import Histogram, extremes
from ampdoctor.probes.measures.grad_sites import GradientHooks, HalfPlan
from ampdoctor.ranges.profile import Collector, RangeProfile, RunFacts

if TYPE_CHECKING:
    from torch import Tensor

    from ampdoctor.hooks.interfaces import Watched


class RangeProbe:
    """Histograms of every place, step by step; tensors themselves are never kept.

    On a device the counting does not wait for it; the step's histograms are read when the step has ended.

    Args:
        plan: What has the half format in the half-precision run; None where that is not known: then everything counts
            as half.

    Attributes:
        counted: The histograms of the step that was finished last.
        hand_scales: For each step the factor between the gradients that the backward delivers and those that the
            optimizer gets (their largest magnitudes); None where either is missing. A constant one is a loss scaled by
            hand.
    """

    def __init__(self, plan: HalfPlan | None = None) -> None:
        self._plan = plan
        self._collector = Collector()
        self._attached = False
        self._step: dict[Place, Histogram] = {}
        self.counted: Mapping[Place, Histogram] = {}
        self._stepped: list[Tensor] = []
        self._hooks = GradientHooks(
            self._on_gradient, on_output=self._on_output, inputs=plan.inputs if plan is not None else frozenset()
        )
        self._sizes: Counter[str] = Counter()
        self.hand_scales: list[float | None] = []

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks on modules, parameters and optimizers; the weights are counted once, before the first step."""
        if not self._attached:
            self._attached = True
            self._count_weights(run)
        with ExitStack() as stack:
            stack.enter_context(self._hooks.attach(run))
            for optimizer in run.optimizers.values():
                stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            yield

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Forget the last step."""
        self._step = {}
        self._stepped = []
        self._hooks.clear()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Add the step to the totals."""
        self._collector.add_step(self._step)
        self._note_hand_scale()
        self.counted, self._step = self._step, {}

    def profile(self, run: RunFacts, **more: Any) -> RangeProfile:
        """Everything that was measured.

        Args:
            run: Facts of the run.
            more: Further fields of the profile.
        """
        return self._collector.profile(run, half=self._is_half, weight=self._sizes.__getitem__, **more)

    def _is_half(self, place: Place) -> bool:
        return self._plan is None or self._plan.holds(place)

    def _count_weights(self, run: Watched) -> None:
        names = run.parameter_names()
        for name, module in run.model.named_modules():
            clean = run.module_names.get(name, name)
            self._sizes[clean] = sum(p.numel() for p in module.parameters(recurse=False))
        self._collector.add_weights(
            {
                Place(names[id(parameter)], "weight", "parameter"): Histogram.of(parameter)
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
        counted = Histogram.of(tensor)
        self._step[place] = counted if before is None else before + counted

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
