"""Collects histograms, step by step, into a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.of_runs.ranges import GRADIENTS, KINDS, Place, Site
from ampdoctor.numerics import Histogram
from ampdoctor.numerics.curves import flushed_counts, powers, scaled_to_fit, squared_errors
from ampdoctor.ranges.profile import EXPONENTS, FP8, RangeProfile, RunFacts, Series

Array = NDArray[np.float64]

_AT_ONCE = 512
"""Number of places whose histograms are dense at the same time: 16 KiB each."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The figures of one step; `places` begins with the gradients, and only these have more than a maximum."""

    places: tuple[Place, ...]
    amax: Array
    nonzero: NDArray[np.int64]
    power: Array
    flushed: NDArray[np.float32]
    error: NDArray[np.float32]


class Collector:
    """Adds up the histograms of every place, and keeps each step's maxima and curves by loss scale."""

    def __init__(self) -> None:
        self._total: dict[Place, Histogram] = {}
        self._fp8: dict[Place, Array] = {}
        self._power: dict[Place, float] = {}
        self._steps: list[_Step] = []

    def add_weights(self, counted: Mapping[Place, Histogram]) -> None:
        """Add what is there before the first step."""
        self._add(counted)

    def add_step(self, counted: Mapping[Place, Histogram]) -> None:
        """Add one step."""
        self._steps.append(self._add(counted))

    def profile(
        self, run: RunFacts, *, half: Callable[[Place], bool], weight: Callable[[str], int], **more: Any
    ) -> RangeProfile:
        """Returns the profile of everything that was added; sites are sorted by kind, name and part.

        Args:
            run: Facts about the run.
            half: Is the tensor at a place in the half format, in the half-precision run?
            weight: Number of parameter elements of a module, by name.
            more: Further fields of the profile.
        """
        places = sorted(self._total, key=lambda p: (KINDS.index(p.kind), p.name, p.part))
        gradients = sum(place.kind in GRADIENTS for place in places)
        return RangeProfile(
            run=run,
            sites=tuple(Site(place=place, half=half(place), weight=max(weight(place.module), 1)) for place in places),
            histograms=tuple(self._total[place] for place in places),
            series=self._series(places, gradients),
            fp8=np.array([self._fp8[place] for place in places]).reshape(len(places), len(FP8), 3),
            square_sums=np.array([self._power[place] for place in places]),
            **more,
        )

    def _series(self, places: list[Place], gradients: int) -> Series:
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
            inside = columns[columns < gradients]
            series.nonzero[row, inside] = step.nonzero
            series.power[row, inside] = step.power
            series.flushed[row, inside] = step.flushed
            series.error[row, inside] = step.error
        return series

    def _add(self, counted: Mapping[Place, Histogram]) -> _Step:
        """Add histograms to the totals, and return the figures of this step."""
        for place, histogram in counted.items():
            before = self._total.get(place)
            self._total[place] = histogram if before is None else before + histogram
        places = tuple(sorted(counted, key=lambda place: place.kind not in GRADIENTS))
        empty = np.zeros(0, dtype=np.int64), np.zeros(0), *(np.zeros((0, len(EXPONENTS)), dtype=np.float32),) * 2
        blocks = [
            self._figures(part, [counted[place] for place in part])
            for part in (places[begin : begin + _AT_ONCE] for begin in range(0, len(places), _AT_ONCE))
        ]
        gradients = sum(place.kind in GRADIENTS for place in places)
        figures = (np.concatenate(parts)[:gradients] for parts in zip(empty, *blocks, strict=True))
        return _Step(places, np.array([_largest(place, counted[place]) for place in places]), *figures)

    def _figures(
        self, places: tuple[Place, ...], histograms: list[Histogram]
    ) -> tuple[NDArray[np.int64], Array, NDArray[np.float32], NDArray[np.float32]]:
        counts = np.stack([histogram.counts.reshape(-1) for histogram in histograms])
        nonzero, power = counts.sum(axis=1), powers(counts)
        amax = np.array([histogram.amax or 0.0 for histogram in histograms])
        fitted = np.stack([scaled_to_fit(counts, amax, fmt) for fmt in FP8], axis=1)
        for index, place in enumerate(places):
            self._fp8[place] = self._fp8.get(place, 0.0) + fitted[index]
            self._power[place] = self._power.get(place, 0.0) + float(power[index])
        flushed = flushed_counts(counts, "fp16", EXPONENTS) / np.maximum(nonzero, 1)[:, None]
        squared = squared_errors(counts, "fp16", EXPONENTS)
        error = np.sqrt(np.divide(squared, power[:, None], out=np.zeros_like(squared), where=power[:, None] > 0.0))
        return nonzero.astype(np.int64), power, flushed.astype(np.float32), error.astype(np.float32)


def _largest(place: Place, counted: Histogram) -> float:
    """Returns the magnitude that a scaler sees: it only checks weight gradients; others may be dropped (by a ReLU)."""
    nonfinite = counted.nans + counted.pos_infs + counted.neg_infs > 0
    return math.inf if nonfinite and place.kind == "weight_grad" else counted.amax or 0.0
