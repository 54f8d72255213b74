"""Converts a profile to named arrays and JSON values, and back; a file's contents are checked before use.

Histograms are stored one after the other, with their occupied bins only; everything that is not an array is in `facts`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ampdoctor.errors import UsageError
from ampdoctor.evidence.run_facts import GRADIENTS, KINDS, PRECISIONS, ModuleFacts, Place, Site, SitePart, UpdateFacts
from ampdoctor.numerics import Histogram
from ampdoctor.numerics.rounding_error import BEYOND_FP32, BINS, Tally
from ampdoctor.ranges.profile import EXPONENTS, FP8, RangeProfile, RunFacts, Series, Shadow

Arrays = dict[str, NDArray[Any]]
VERSION = 2  # to be raised when an existing reader could misread what is written
MAX_STEPS = 1_000_000
LARGEST_SCALE = 2.0**256  # a scaler's scale times a manual one, each a float32; powers beyond leave double precision
_Record = TypeVar("_Record", ModuleFacts, UpdateFacts)
_LARGEST_COUNT = 2**53
_SCALER_NUMBERS = ("scale", "growth_factor", "backoff_factor")
_SCALER_COUNTS = ("growth_interval", "_growth_tracker")
_SERIES = {"amax": "f8", "nonzero": "i8", "power": "f8", "flushed": "f4", "error": "f4"}
_SHADOW = {"nonzero": "i8", "flushed": "i8", "predicted": "f8"}


def pack(profile: RangeProfile) -> tuple[Arrays, dict[str, Any]]:
    """Return the profile's arrays and the rest of it as JSON values; `unpack` gives an equal profile."""
    tallies = [histogram.counts.reshape(-1) for histogram in profile.histograms]
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
    run = asdict(profile.run)
    facts = {
        "version": VERSION,
        "exponents": [int(EXPONENTS[0]), int(EXPONENTS[-1])],
        "fp8_formats": list(FP8),
        "run": run | {"scaler": None if profile.run.scaler is None else _spelled(profile.run.scaler)},
        "sites": [_spread(site) for site in profile.sites],
        "nonfinite_steps": list(profile.nonfinite_steps),
        "modules": [asdict(module) for module in profile.modules],
        "updates": [asdict(update) for update in profile.updates],
        "shadows": [
            {
                "scale": shadow.scale,
                "steps": list(shadow.steps),
                "relative_error": _spelled_number(shadow.relative_error),
                "predicted_error": _spelled_number(shadow.predicted_error),
            }
            for shadow in profile.shadows
        ],
    }
    return arrays, facts


def unpack(arrays: Mapping[str, NDArray[Any]], facts: Any) -> RangeProfile:
    """Return the profile that `pack` converted; raises UsageError for another version, or invalid data."""
    if not isinstance(facts, Mapping):
        raise UsageError("its facts are no object")
    if facts.get("version") != VERSION:
        raise UsageError(f"it has version {_shown(facts.get('version'))}; this ampdoctor reads version {VERSION}")
    if facts.get("exponents") != [int(EXPONENTS[0]), int(EXPONENTS[-1])] or facts.get("fp8_formats") != list(FP8):
        raise UsageError("its curves are at other scales, or of other formats, than this ampdoctor's")
    sites = tuple(_site(entry, index) for index, entry in enumerate(_list(facts, "sites")))
    kinds = [KINDS.index(site.kind) for site in sites]
    if kinds != sorted(kinds) or len({site.place for site in sites}) != len(sites):
        raise UsageError("its sites are not in order, or not all different")
    gradients = sum(site.kind in GRADIENTS for site in sites)
    steps = len(_array(arrays, "series.amax", "f8", (None, len(sites))))
    if steps > MAX_STEPS:
        raise UsageError(f"it says {steps} steps: more than is ever read")
    shapes: dict[str, tuple[int | None, ...]] = {
        "amax": (steps, len(sites)),
        "nonzero": (steps, gradients),
        "power": (steps, gradients),
        "flushed": (steps, gradients, len(EXPONENTS)),
        "error": (steps, gradients, len(EXPONENTS)),
    }
    series = {name: _array(arrays, f"series.{name}", dtype, shapes[name]) for name, dtype in _SERIES.items()}
    _not_negative(series, but_infinite=("amax",))
    if (series["flushed"] > 1.0).any():
        raise UsageError("a flushed share in it is above 1")
    sums = {
        "fp8": _array(arrays, "fp8", "f8", (len(sites), len(FP8), 3)),
        "square_sums": _array(arrays, "square_sums", "f8", (len(sites),)),
    }
    _not_negative(sums)
    return RangeProfile(
        run=_run(_mapping(facts, "run")),
        sites=sites,
        histograms=_histograms(arrays, sites),
        series=Series(**series),
        **sums,
        nonfinite_steps=_steps(facts, "nonfinite_steps", steps),
        modules=tuple(_record(ModuleFacts, entry) for entry in _list(facts, "modules")),
        updates=tuple(_record(UpdateFacts, entry) for entry in _list(facts, "updates")),
        shadows=tuple(
            _shadow(arrays, entry, index, steps, gradients) for index, entry in enumerate(_list(facts, "shadows"))
        ),
    )


def _histograms(arrays: Mapping[str, NDArray[Any]], sites: Sequence[Site]) -> tuple[Histogram, ...]:
    ends = _array(arrays, "histogram.ends", "i8", (len(sites),))
    bins = _array(arrays, "histogram.bins", "i2", (None,)).astype(np.intp)
    counts = _array(arrays, "histogram.counts", "i8", (len(bins),))
    special = _array(arrays, "histogram.special", "i8", (len(sites), 5))
    extremes = _array(arrays, "histogram.extremes", "f8", (len(sites), 3))
    starts = np.concatenate([[0], ends[:-1]]) if len(sites) else ends
    whole = (ends[-1] if len(sites) else 0) == len(bins) and bool((ends >= starts).all())
    if not whole or ((bins < 0) | (bins > BEYOND_FP32)).any() or ((counts < 1) | (counts > _LARGEST_COUNT)).any():
        raise UsageError("its histograms have bins or counts that no tensor has")
    if ((special < 0) | (special > _LARGEST_COUNT)).any() or not (extremes >= 0.0).all():
        raise UsageError("its histograms have negative counts or magnitudes")
    made = []
    for site, start, end, rest, (amin, amax, spacing) in zip(
        sites, starts.tolist(), ends.tolist(), special.tolist(), extremes.tolist(), strict=True
    ):
        dense = np.zeros(BINS, dtype=np.int64)
        dense[bins[start:end]] = counts[start:end]
        tally = Tally(
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
        if end > start and ((np.diff(bins[start:end]) <= 0).any() or not 1 <= rest[4] <= 53 or math.isinf(amax)):
            raise UsageError(f"{site.label}: its histogram contradicts itself")
        try:
            tally.check()
        except UsageError as error:
            raise UsageError(f"{site.label}: {error}") from None
        made.append(Histogram(tally))
    return tuple(made)


def _shadow(arrays: Mapping[str, NDArray[Any]], entry: Any, index: int, steps: int, gradients: int) -> Shadow:
    if not isinstance(entry, Mapping):
        raise UsageError("an entry of its shadows is no object")
    parts = {name: _array(arrays, f"shadow.{index}.{name}", dtype, (gradients,)) for name, dtype in _SHADOW.items()}
    _not_negative(parts)
    return Shadow(
        scale=_scale(entry, "scale"),
        steps=_steps(entry, "steps", steps),
        relative_error=_error(entry.get("relative_error")),
        predicted_error=_error(entry.get("predicted_error")),
        **parts,
    )


def _run(data: Mapping[str, Any]) -> RunFacts:
    precision, factory = data.get("precision"), data.get("factory")
    if precision not in PRECISIONS or not isinstance(factory, str):
        raise UsageError(f"its precision is {_shown(precision)}, none of {', '.join(PRECISIONS)}, or it has no factory")
    return RunFacts(
        precision=precision,
        factory=factory,
        autocast=data.get("autocast") is True,
        master_weights=data.get("master_weights") is True,
        scaler=_scaler(data.get("scaler")),
        loss_scale=_scale(data, "loss_scale"),
        base_scale=_scale(data, "base_scale"),
        accumulation=max(_count(data, "accumulation"), 1),
        loss_divided=data.get("loss_divided") is True,
        loss_in_half=data.get("loss_in_half") is True,
        loss_amax=None if data.get("loss_amax") is None else _number(data["loss_amax"], "its loss_amax"),
    )


def _spread(site: Site) -> dict[str, Any]:
    return {**asdict(site.place), "half": site.half, "weight": site.weight}


def _site(entry: Any, index: int) -> Site:
    if not isinstance(entry, Mapping):
        raise UsageError(f"its site {index} is no object")
    name, kind, part = entry.get("name"), entry.get("kind"), entry.get("part")
    if not isinstance(name, str) or kind not in KINDS or part not in get_args(SitePart):
        raise UsageError(f"its site {index} has no name, kind or part that this ampdoctor knows")
    return Site(
        place=Place(name, kind, part),  # type: ignore[arg-type]  # one of its names: checked above
        half=entry.get("half") is True,
        weight=max(_count(entry, "weight"), 1),
    )


def _record(kind: type[_Record], entry: Any) -> _Record:
    """A flat dataclass from JSON; each field is checked against its annotation."""
    what = kind.__name__
    if not isinstance(entry, Mapping) or set(entry) != {field.name for field in fields(kind)}:
        raise UsageError(f"an entry of {what} lacks a field, or has one too many")
    for name, wanted in get_type_hints(kind).items():
        value = entry[name]
        fits = {
            str: isinstance(value, str),
            int: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63,
            float: _is_finite(value),
            float | None: value is None or _is_finite(value),
            int | None: value is None or (isinstance(value, int) and not isinstance(value, bool)),
            bool | None: value is None or isinstance(value, bool),
            Mapping[str, str]: isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()),
        }[wanted]
        if not fits:
            raise UsageError(f"an entry of {what} has {_shown(value)} for {name}")
    return kind(**entry)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _scaler(state: Any) -> dict[str, Any] | None:
    """A scaler's state with numbers for its settings; a NaN scale may be written as "NaN"."""
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise UsageError("its scaler is no mapping")
    read = dict(state)
    for key in (*_SCALER_NUMBERS, *_SCALER_COUNTS):
        if key not in state:
            continue
        value = _number(state[key], f"its scaler's {key}")
        if key in _SCALER_COUNTS and not abs(value) < 2.0**63:
            raise UsageError(f"its scaler's {key} is {_shown(state[key])}, not a number")
        if not isinstance(state[key], int):
            read[key] = value
    return read


def _array(arrays: Mapping[str, NDArray[Any]], name: str, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
    found = arrays.get(name)
    if found is None:
        raise UsageError(f"it lacks {name}")
    fits = found.ndim == len(shape) and all(w in (None, s) for s, w in zip(found.shape, shape, strict=True))
    if found.dtype != np.dtype(dtype) or not fits:
        raise UsageError(f"{name} has another shape or dtype than its sites and steps ask for")
    return found


def _not_negative(arrays: Mapping[str, NDArray[Any]], but_infinite: tuple[str, ...] = ()) -> None:
    for name, values in arrays.items():
        fine = values >= 0 if name in but_infinite else (values >= 0) & np.isfinite(values)
        if not fine.all():
            raise UsageError(f"{name} holds a negative number, or one that is not finite")


def _steps(data: Mapping[str, Any], key: str, steps: int) -> tuple[int, ...]:
    listed = _list(data, key)
    whole = all(isinstance(s, int) and not isinstance(s, bool) for s in listed)
    if not whole or not all(0 <= s < steps for s in listed):
        raise UsageError(f"its {key} are no list of steps from 0 to {steps - 1}")
    return tuple(listed)


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise UsageError(f"it lacks its {key}")
    return value


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, Mapping):
        raise UsageError(f"it lacks its {key}")
    return value


def _count(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise UsageError(f"its {key} is {_shown(value)}, not a count")
    return value


def _scale(data: Mapping[str, Any], key: str) -> float:
    value = _number(data.get(key), f"its {key}")
    if not 1.0 / LARGEST_SCALE <= value <= LARGEST_SCALE:
        raise UsageError(f"its {key} is {value!r}, not a positive number that a scale can be")
    return value


def _error(value: Any) -> float | None:
    if value is None:
        return None
    number = _number(value, "an error of its shadows")
    if not number >= 0.0:
        raise UsageError(f"an error of its shadows is {_shown(value)}, not a magnitude")
    return number


def _number(value: Any, what: str) -> float:
    """A JSON number, or the number for a string that stands for a non-finite one."""
    if isinstance(value, str) and value in {"Infinity", "-Infinity", "NaN"}:
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise UsageError(f"{what} is {_shown(value)}, not a number that a float can hold")


def _spelled(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _spelled_number(value) for key, value in state.items()}


def _spelled_number(value: Any) -> Any:
    """Spell a non-finite number as a string, because strict JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _shown(value: Any) -> str:
    """A value for a sentence, cut after 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
