"""A profile from the histograms in a run's log, measured by a live training at its own loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampdoctor.errors import UsageError
from ampdoctor.evidence.log_records import DetailLine, Role, RunLine, StepLine, TensorDetail
from ampdoctor.evidence.run_facts import PRECISIONS, Place, SiteKind, SitePart
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.ranges.profile import Collector, RangeProfile, RunFacts

_KINDS: Mapping[Role, SiteKind] = {
    "gradient": "weight_grad",
    "activation_gradient": "activation_grad",
    "activation": "activation",
    "parameter": "weight",
}
_PARTS: Mapping[str, SitePart] = {"output": "output", "input": "input"}
_HALVES = frozenset({"fp16", "bf16"})


def profile_from_log(details: Sequence[tuple[RunLine, DetailLine]], steps: Sequence[StepLine]) -> RangeProfile:
    """The profile that a log's histograms give; gradients are divided by the loss scale.

    A step with a non-finite gradient is left out: it was skipped, or belongs to the diagnosis. A gradient's histogram
    lacks what was lost before it was counted. So the profile shows less underflow at the run's own scale than one that
    was measured in fp32.

    Each detail comes with the header that its indices refer to, in the order of the steps. Raises UsageError if no step
    has a histogram of a finite gradient, or a histogram contradicts itself.
    """
    found = _Found()
    for run, detail in details:
        found.add(run, detail)
    by_step = {step: counted for step, counted in found.gradients.items() if _is_finite(counted)}
    if not by_step:
        raise UsageError("the log has no histogram of a finite gradient: nothing in it says which scale fits")
    collector = Collector()
    collector.add_weights(found.weights)
    for step in sorted(by_step):
        collector.add_step(by_step[step])
    return collector.profile(
        _facts(details[-1][0], steps), half=found.is_half, weight=lambda module: found.elements.get(module, 0)
    )


class _Found:
    """What the details contain, by place."""

    def __init__(self) -> None:
        self.gradients: dict[int, dict[Place, Histogram]] = {}  # by step, of gradients and activations
        self.weights: dict[Place, Histogram] = {}  # the first histogram of each parameter
        self.elements: dict[str, int] = {}  # of each module's own parameters
        self._autocast = True
        self._parameters: set[str] = set()
        self._of_modules: dict[str, set[str]] = {}
        self._of_parameters: dict[str, set[str]] = {}

    def add(self, run: RunLine, detail: DetailLine) -> None:
        self._autocast = run.autocast is not False
        counted = self.gradients.setdefault(detail.step, {})
        for tensor in detail.tensors:
            place = _place(run, tensor)
            if place is None:
                continue
            self._note(place, tensor)
            if tensor.histogram is None:
                continue
            if place.kind == "weight":
                self.weights.setdefault(place, _histogram(tensor))
            else:
                counted[place] = counted.get(place, Histogram.empty()) + _histogram(tensor)

    def is_half(self, place: Place) -> bool:
        """Whether the tensor, or what its module computes, is in a half format; True where the log does not say."""
        own = set() if self._autocast else self._of_parameters.get(place.name)
        formats = self._of_modules.get(place.module) or own
        return not formats or bool(formats & _HALVES)

    def _note(self, place: Place, tensor: TensorDetail) -> None:
        of_parameter = place.part == "parameter"
        if tensor.format is not None:
            formats = self._of_parameters if of_parameter else self._of_modules
            formats.setdefault(place.name, set()).add(tensor.format)
        if of_parameter and tensor.elements is not None and place.name not in self._parameters:
            self._parameters.add(place.name)
            self.elements[place.module] = self.elements.get(place.module, 0) + tensor.elements


def _place(run: RunLine, tensor: TensorDetail) -> Place | None:
    """Where a tensor is measured; None for what a profile does not contain, and for an index without a name."""
    kind = _KINDS.get(tensor.role)
    if kind is None or tensor.tensor >= len(run.tensors):
        return None
    name = run.tensors[tensor.tensor]
    if kind in {"weight", "weight_grad"}:
        return Place(name, kind, "parameter")
    part = _PARTS.get(tensor.part)
    return None if part is None else Place(name, kind, part)


def _histogram(tensor: TensorDetail) -> Histogram:
    """The histogram of the unscaled elements; a sample is extended to all of them."""
    histogram = Histogram.from_dict(tensor.histogram or {})
    if tensor.elements is not None and tensor.sampled:
        histogram = histogram.repeated(max(round(tensor.elements / tensor.sampled), 1))
    if tensor.scale is not None and 0.0 < tensor.scale < math.inf:
        histogram = histogram.scaled(1.0 / tensor.scale)
    return histogram


def _is_finite(counted: Mapping[Place, Histogram]) -> bool:
    gradients = [histogram for place, histogram in counted.items() if place.kind == "weight_grad"]
    return bool(gradients) and not any(h.nans or h.pos_infs or h.neg_infs for h in gradients)


def _facts(run: RunLine, steps: Sequence[StepLine]) -> RunFacts:
    precision = run.precision if run.precision in PRECISIONS else "fp16" if run.scaler is not None else "fp32"
    scales = [step.loss_scale for step in steps if step.loss_scale is not None and 0.0 < step.loss_scale < math.inf]
    losses = [abs(step.loss) for step in steps if step.loss is not None and math.isfinite(step.loss)]
    scaler: dict[str, Any] | None = None
    if run.scaler is not None:
        numbers = {key: value for key, value in run.scaler.items() if isinstance(value, int | float)}
        scaler = numbers | ({"scale": scales[-1]} if scales else {})
    return RunFacts(
        precision=precision,
        autocast=run.autocast is not False,
        master_weights=run.master_weights is True,
        scaler=scaler or None,
        loss_scale=scales[-1] if scales else 1.0,
        accumulation=run.accumulation or 1,
        loss_amax=max(losses, default=None),
    )
