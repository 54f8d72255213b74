"""The measured ranges of a run's tensors in an fp32 reference, and figures derived from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.run_facts import GRADIENTS, KINDS, ModuleFacts, Place, RangeFigures, Site, SiteKind, UpdateFacts
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.numerics.rounding_error import flushed_counts, powers, scaled_to_fit, squared_errors

EXPONENTS = np.arange(-10, 33)  # log2 of the loss scales at which a profile keeps its curves: 2^-10 to 2^32
FP8 = ("e4m3fn", "e5m2")  # formats that every tensor is scaled to fit, step by step
SURE_BELOW = 1e-2
"""Share of flushed activation gradients above which the prediction for weight gradients is only a lower bound.

The weight gradients made of them then lose more than their own histogram shows: up to this share the prediction held
within a factor of 3.5, at 10 % it was off by up to 440 (measured, 24 blocks). Which activation gradients a weight
gradient is made of is unknown (those inside an LSTM or an attention are not sites). So if one flushes more, the
prediction for all weight gradients is a lower bound.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known about the run besides its ranges."""

    precision: str  # that the run itself uses
    factory: str = ""  # name of the factory that made the run
    autocast: bool = True
    master_weights: bool = False  # a half model has fp32 master weights in its optimizer
    scaler: Mapping[str, Any] | None = None  # state of its own enabled GradScaler (`state_dict()` form)
    loss_scale: float = 1.0  # the scaler's, a manual one, or 1.0
    base_scale: float = 1.0  # factor in the measured gradients: a manual loss scale inside the user's step
    accumulation: int = 1  # micro-batches per step
    loss_in_half: bool = False  # the scaled loss stays in fp16: a loss of shape [1] (a 0-dim one is promoted)
    loss_amax: float | None = None  # largest magnitude; None if unknown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Figures step by step: n steps, k sites, the first g of which are gradients."""

    amax: NDArray[np.float64]  # (n, k): largest finite magnitude, or 0; inf for a non-finite weight gradient
    nonzero: NDArray[np.int64]  # (n, g): nonzero finite elements
    power: NDArray[np.float64]  # (n, g): sum of their squares
    flushed: NDArray[np.float32]  # (n, g, 43): share of nonzero elements that is zero in fp16 at each of 2^EXPONENTS
    error: NDArray[np.float32]  # (n, g, 43): relative L2 error of rounding to fp16 there, without overflow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shadow:
    """Half-precision steps with the weights, batch and random state of fp32 ones: measured and predicted figures.

    `relative_error` is the L2 error of all weight gradients, the median over the steps; inf if one was not finite, None
    if nothing could be compared. `predicted_error`: the same by rounding each weight gradient of the fp32 histograms
    once.
    """

    scale: float  # loss scale of the half-precision steps
    steps: tuple[int, ...]  # in the fp32 run
    nonzero: NDArray[np.int64]  # (g,): elements of each half gradient that are not zero in fp32; 0 for other sites
    flushed: NDArray[np.int64]  # (g,): those of them that became zero in half because of the range
    predicted: NDArray[np.float64]  # (g,): their number by the fp32 histograms of the same steps
    relative_error: float | None
    predicted_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeProfile:
    """A measured run. Gradients are as the backward delivers them; figures at a loss scale refer to the unscaled loss.

    `nonfinite_steps` are steps at which the fp32 reference itself was not finite: loss, weight gradients, parameters or
    optimizer state. `fp8` has for each site and format of `FP8`, scaled to fit in each step: flushed elements,
    subnormal elements, sum of squared errors.
    """

    run: RunFacts
    sites: tuple[Site, ...]  # gradients first, in a fixed order
    histograms: tuple[Histogram, ...]  # one for each site, all steps together
    series: Series  # the same step by step
    fp8: NDArray[np.float64]  # (k, 2, 3)
    square_sums: NDArray[np.float64]  # (k,): sum of squares of each site, to which `fp8`'s errors are relative
    nonfinite_steps: tuple[int, ...] = ()
    modules: tuple[ModuleFacts, ...] = ()  # ops of the half-precision step, by module
    updates: tuple[UpdateFacts, ...] = ()  # effect of the updates on bf16 weights
    shadows: tuple[Shadow, ...] = ()  # half-precision steps; () if none could be run

    @property
    def steps(self) -> int:
        """Number of measured optimizer steps."""
        return len(self.series.amax)

    @property
    def gradients(self) -> int:
        """g, the number of gradient sites."""
        return sum(site.kind in GRADIENTS for site in self.sites)

    def of_kind(self, kind: SiteKind, without: Collection[str] = ()) -> list[int]:
        """Indices of a kind's sites that are in the half format, except those of the modules `without`."""
        return [
            index
            for index, site in enumerate(self.sites)
            if site.kind == kind and site.half and site.module not in without
        ]

    def half_gradients(self, without: Collection[str] = ()) -> list[int]:
        """Indices of the gradients in the half format, except those of the modules `without` (modules in fp32)."""
        return [index for kind in GRADIENTS for index in self.of_kind(kind, without)]

    def merged(self, kind: SiteKind, without: Collection[str] = ()) -> Histogram:
        """One histogram of all sites of a kind that are in the half format."""
        parts = [self.histograms[index] for index in self.of_kind(kind, without)]
        return functools.reduce(Histogram.__add__, parts, Histogram.empty())

    def factor(self, kind: SiteKind, scale: float) -> float:
        """The factor for a histogram of a kind at a loss scale, without the base scale; 1 for what is not scaled."""
        return scale / self.run.base_scale if kind in GRADIENTS else 1.0

    def log2_series(self, index: int) -> list[float]:
        """log2 of a gradient's largest unscaled magnitude, for the steps with a finite nonzero one."""
        base = math.log2(self.run.base_scale)
        return [math.log2(v) - base for v in self.series.amax[:, index].tolist() if 0.0 < v < math.inf]


def figures(histogram: Histogram, fmt: str, factor: float) -> RangeFigures:
    """The effect of a format on the values times `factor`."""
    numel = histogram.numel
    return RangeFigures(
        flushed=histogram.flushed(fmt, factor),
        subnormal=histogram.subnormal(fmt, factor),
        overflowed=histogram.overflowed(fmt, factor),
        relative_error=histogram.relative_error(fmt, factor),
        zeros=histogram.zeros / numel if numel else 0.0,
    )


def fitted_figures(profile: RangeProfile, indices: Iterable[int], fmt: str) -> RangeFigures:
    """The effect of an 8-bit format on these sites, each scaled to fit in each step: nothing overflows."""
    chosen = list(indices)
    sums = profile.fp8[chosen, FP8.index(fmt)].sum(axis=0)
    numel = sum(profile.histograms[index].numel for index in chosen)
    zeros = sum(profile.histograms[index].zeros for index in chosen)
    nonzero = sum(int(profile.histograms[index].counts.sum()) for index in chosen)
    power = float(profile.square_sums[chosen].sum())
    return RangeFigures(
        flushed=float(sums[0]) / nonzero if nonzero else 0.0,
        subnormal=float(sums[1]) / nonzero if nonzero else 0.0,
        overflowed=0.0,
        relative_error=math.sqrt(float(sums[2]) / power) if power > 0.0 else 0.0,
        zeros=zeros / numel if numel else 0.0,
    )


# -- collecting histograms, step by step, into a profile --

Array = NDArray[np.float64]
_AT_ONCE = 512  # number of places whose histograms are dense at the same time: 16 KiB each


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
        """Add the weights before the first step."""
        self._add(counted)

    def add_step(self, counted: Mapping[Place, Histogram]) -> None:
        """Add one step."""
        self._steps.append(self._add(counted))

    def profile(
        self, run: RunFacts, *, half: Callable[[Place], bool], weight: Callable[[str], int], **more: Any
    ) -> RangeProfile:
        """The profile of all that was added, sites by kind, name and part; `weight(name)` is a module's elements."""
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
        counts = np.stack([histogram.counts for histogram in histograms])
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
    """The largest magnitude; inf for a non-finite weight gradient: a scaler checks no others, which may be dropped."""
    nonfinite = counted.nans + counted.pos_infs + counted.neg_infs > 0
    return math.inf if nonfinite and place.kind == "weight_grad" else counted.amax or 0.0
