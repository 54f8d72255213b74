"""Converts a profile to named arrays and JSON values, and back.

Histograms are stored one after the other, with their occupied bins only; what is not an array is in `_Facts`. The file
has a checksum (`workflows.profile`), so that only the form is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.errors import UsageError
from ampdoctor.evidence.json_records import MismatchError, Positive, from_plain
from ampdoctor.evidence.run_facts import GRADIENTS, ModuleFacts, Place, Site, SiteKind, SitePart, UpdateFacts
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.numerics.rounding_error import BINS
from ampdoctor.ranges.profile import EXPONENTS, FP8, RangeProfile, RunFacts, Series, Shadow

Arrays = dict[str, NDArray[Any]]
VERSION = 2  # to be raised when an existing reader could misread what is written
_SERIES = {"amax": "f8", "nonzero": "i8", "power": "f8", "flushed": "f4", "error": "f4"}
_SHADOW = {"nonzero": "i8", "flushed": "i8", "predicted": "f8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    name: str
    kind: SiteKind
    part: SitePart
    half: bool
    weight: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shadow:
    scale: float
    steps: tuple[int, ...]
    relative_error: float | None
    predicted_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    version: int
    exponents: tuple[int, ...]  # the first and the last of the loss scales with curves
    fp8_formats: tuple[str, ...]
    run: RunFacts
    sites: tuple[_Site, ...]
    nonfinite_steps: tuple[int, ...]
    modules: tuple[ModuleFacts, ...]
    updates: tuple[UpdateFacts, ...]
    shadows: tuple[_Shadow, ...]


_CURVES = (int(EXPONENTS[0]), int(EXPONENTS[-1]))


def pack(profile: RangeProfile) -> tuple[Arrays, dict[str, Any]]:
    """Return the profile's arrays and the rest of it as JSON values; `unpack` gives an equal profile."""
    tallies = [histogram.counts for histogram in profile.histograms]
    occupied = [np.flatnonzero(counts) for counts in tallies]
    arrays: Arrays = {
        "histogram.bins": np.concatenate([np.empty(0, dtype=np.int64), *occupied]).astype(np.int16),
        "histogram.counts": np.concatenate(
            [np.empty(0, dtype=np.int64), *(counts[bins] for counts, bins in zip(tallies, occupied, strict=True))]
        ),
        "histogram.ends": np.cumsum([len(bins) for bins in occupied], dtype=np.int64),
        "histogram.special": np.array(
            [[h.zeros, h.nans, h.pos_infs, h.neg_infs, h.significand_bits] for h in profile.histograms], dtype=np.int64
        ).reshape(-1, 5),
        "histogram.extremes": np.array(
            [[h.amin or 0.0, h.amax or 0.0, h.min_spacing] for h in profile.histograms], dtype=np.float64
        ).reshape(-1, 3),
        "fp8": profile.fp8,
        "square_sums": profile.square_sums,
    }
    arrays |= {f"series.{name}": getattr(profile.series, name) for name in _SERIES}
    for index, shadow in enumerate(profile.shadows):
        arrays |= {f"shadow.{index}.{name}": getattr(shadow, name) for name in _SHADOW}
    facts = _Facts(
        version=VERSION,
        exponents=_CURVES,
        fp8_formats=FP8,
        run=profile.run,
        sites=tuple(_Site(**asdict(site.place), half=site.half, weight=site.weight) for site in profile.sites),
        nonfinite_steps=profile.nonfinite_steps,
        modules=profile.modules,
        updates=profile.updates,
        shadows=tuple(_Shadow(**{f.name: getattr(one, f.name) for f in fields(_Shadow)}) for one in profile.shadows),
    )
    return arrays, _spelled(asdict(facts))


def unpack(arrays: Mapping[str, NDArray[Any]], facts: Any) -> RangeProfile:
    """Return the profile that `pack` converted; raises UsageError for another version, or another form."""
    version = facts.get("version") if isinstance(facts, Mapping) else None
    if version != VERSION:
        raise UsageError(f"it has version {version}; this ampdoctor reads version {VERSION}")
    try:
        known = from_plain(_Facts, facts)
    except MismatchError as mismatch:
        raise UsageError(f"of its facts, {mismatch}") from None
    if known.exponents != _CURVES or known.fp8_formats != FP8:
        raise UsageError("its curves are at other scales, or of other formats, than this ampdoctor's")
    scaler = known.run.scaler
    if scaler is not None:  # a number that is not finite was written as a word
        scaler = {key: float(value) if isinstance(value, str) else value for key, value in scaler.items()}
    sites = len(known.sites)
    gradients = sum(site.kind in GRADIENTS for site in known.sites)
    steps = len(arrays.get("series.amax", ()))

    def read(name: str, dtype: str, *shape: int) -> NDArray[Any]:
        found = arrays.get(name)
        if found is None or found.dtype != np.dtype(dtype) or found.shape != shape:
            raise UsageError(f"{name} is missing, or has another shape or dtype than its sites and steps ask for")
        return found

    shapes = {
        "amax": (steps, sites),
        "nonzero": (steps, gradients),
        "power": (steps, gradients),
        "flushed": (steps, gradients, len(EXPONENTS)),
        "error": (steps, gradients, len(EXPONENTS)),
    }
    occupied = len(arrays.get("histogram.bins", ()))
    return RangeProfile(
        run=replace(known.run, scaler=scaler),
        sites=tuple(
            Site(place=Place(site.name, site.kind, site.part), half=site.half, weight=site.weight)
            for site in known.sites
        ),
        histograms=_histograms(
            read("histogram.bins", "i2", occupied),
            read("histogram.counts", "i8", occupied),
            read("histogram.ends", "i8", sites),
            read("histogram.special", "i8", sites, 5),
            read("histogram.extremes", "f8", sites, 3),
        ),
        series=Series(**{name: read(f"series.{name}", dtype, *shapes[name]) for name, dtype in _SERIES.items()}),
        fp8=read("fp8", "f8", sites, len(FP8), 3),
        square_sums=read("square_sums", "f8", sites),
        nonfinite_steps=known.nonfinite_steps,
        modules=known.modules,
        updates=known.updates,
        shadows=tuple(
            Shadow(
                **asdict(shadow)
                | {name: read(f"shadow.{index}.{name}", dtype, gradients) for name, dtype in _SHADOW.items()}
            )
            for index, shadow in enumerate(known.shadows)
        ),
    )


def _histograms(
    bins: NDArray[np.int16],
    counts: NDArray[np.int64],
    ends: NDArray[np.int64],
    special: NDArray[np.int64],
    extremes: NDArray[np.float64],
) -> tuple[Histogram, ...]:
    made, start = [], 0
    for end, rest, (amin, amax, spacing) in zip(ends.tolist(), special.tolist(), extremes.tolist(), strict=True):
        dense = np.zeros(BINS, dtype=np.int64)
        dense[bins[start:end]] = counts[start:end]
        start = end
        histogram = Histogram(
            counts=dense,
            zeros=rest[0],
            nans=rest[1],
            pos_infs=rest[2],
            neg_infs=rest[3],
            significand_bits=rest[4],
            amin=amin or None,
            amax=amax or None,
            min_spacing=spacing,
        )
        made.append(histogram)
    return tuple(made)


def _spelled(value: Any) -> Any:
    """Return JSON values with each non-finite number as a string, because strict JSON has none."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
