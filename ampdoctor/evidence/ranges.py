"""The ranges of a run: what was measured at each place, as plain data that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ampdoctor.errors import UsageError

SiteKind = Literal["activation_grad", "weight_grad", "activation", "weight"]
SitePart = Literal["output", "input", "parameter"]

PROFILE_VERSION = 1
"""Of the entries that `RangeProfile.from_dict` reads; raised when a reader of today could misread them."""


MAX_STEPS = 1_000_000
"""Of a profile that is read: what goes through it step by step would never end on a made-up number."""
MAX_MAXIMA = 20_000_000
"""Steps times sites of a profile that is read; as text so many magnitudes fill about a quarter of a gigabyte."""
LARGEST_SCALE = 2.0**256
"""A scaler's scale times one made by hand, each a float32; beyond it, powers leave double precision."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""What a run computes in (`precision.Compute`, which this room cannot see)."""
_SCALER_NUMBERS = ("scale", "growth_factor", "backoff_factor")
_SCALER_COUNTS = ("growth_interval", "_growth_tracker")

ISLANDS_AT_MOST = 0.2
"""Share of the parameters beyond which fp32 modules are no longer the cheap answer and bf16 is (a default of ours)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRange:
    """One measured place, all steps and calls together.

    Attributes:
        name: Of the module as in `named_modules()` ("" is the model itself), or of the parameter.
        kind: What was measured there.
        part: `output` or `input` of the module; `parameter` for weights and their gradients.
        half: In the half-precision run this tensor has, or passes through, the half format; only such places count in
            a summary. What autocast keeps in fp32 (layer norms, losses) cannot flush.
        weight: Parameter elements of the module, at least 1: what it costs to keep it in fp32.
        histogram: `numerics.Histogram.to_dict()`.
        amax_by_step: Largest finite magnitude in each step; None where there was no nonzero one, inf where a weight
            gradient was not finite.
    """

    name: str
    kind: SiteKind
    part: SitePart
    half: bool
    weight: int
    histogram: Mapping[str, Any]
    amax_by_step: tuple[float | None, ...]

    @property
    def label(self) -> str:
        """For a sentence: "head.output (activation_grad)"."""
        place = self.name if self.part == "parameter" else f"{self.name or 'model'}.{self.part}"
        return f"{place} ({self.kind})"

    @property
    def module(self) -> str:
        """The module concerned: the owner of a parameter."""
        return self.name.rpartition(".")[0] if self.part == "parameter" else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeProfile:
    """What a run's tensors look like along an fp32 reference.

    Attributes:
        sites: All places, in a fixed order.
        steps: Optimizer steps that were measured.
        precision: The precision that the run itself asks for.
        autocast: Whether the run computes under autocast.
        scaler: The run's own GradScaler state (`state_dict()` form); None where it has none that is enabled.
        loss_scale: The scale that the run's loss has: the scaler's, a hand-made one, or 1.0.
        base_scale: Factor that the measured gradients already carry (a loss scaled by hand inside the user's step);
            1.0 otherwise.
        loss_in_half: The scaled loss stays in fp16 (a loss of shape [1] in fp16: a 0-dim one is promoted).
        loss_amax: Largest magnitude of the loss; None where it is not known.
        nonfinite_steps: Steps at which the fp32 reference itself was not finite: loss, weight gradients, parameters or
            optimizer state.
    """

    sites: tuple[SiteRange, ...]
    steps: int
    precision: str
    autocast: bool = True
    scaler: Mapping[str, Any] | None = None
    loss_scale: float = 1.0
    base_scale: float = 1.0
    loss_in_half: bool = False
    loss_amax: float | None = None
    nonfinite_steps: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the sites (the report shows each with its figures: `site_entry`)."""
        return {
            "version": PROFILE_VERSION,
            "steps": self.steps,
            "precision": self.precision,
            "autocast": self.autocast,
            "scaler": None if self.scaler is None else dict(self.scaler),
            "loss_scale": self.loss_scale,
            "base_scale": self.base_scale,
            "loss_in_half": self.loss_in_half,
            "loss_amax": self.loss_amax,
            "nonfinite_steps": list(self.nonfinite_steps),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RangeProfile:
        """Read the `profile` section of a report.

        Raises:
            UsageError: The section is of another version, lacks something or contradicts itself.
        """
        measured = data.get("measured")
        sites = data.get("sites")
        if not isinstance(measured, Mapping) or not isinstance(sites, Sequence) or isinstance(sites, str):
            raise UsageError("the profile lacks its 'measured' or 'sites': it is not what `ampdoctor profile` wrote")
        if measured.get("version") != PROFILE_VERSION:
            raise UsageError(
                f"the profile has version {measured.get('version')!r}; this ampdoctor reads version {PROFILE_VERSION}"
            )
        steps = _whole(measured, "steps", "the profile")
        if steps > MAX_STEPS or steps * len(sites) > MAX_MAXIMA:
            raise UsageError(f"the profile says {steps} steps of {len(sites)} places: more than is ever read")
        precision = measured.get("precision")
        if precision not in PRECISIONS:
            raise UsageError(f"the profile's precision is {precision!r}, none of {', '.join(PRECISIONS)}")
        return cls(
            sites=tuple(_site(entry, index, steps) for index, entry in enumerate(sites)),
            steps=steps,
            precision=precision,
            autocast=measured.get("autocast") is True,
            scaler=_scaler(measured.get("scaler")),
            loss_scale=_positive(measured, "loss_scale"),
            base_scale=_positive(measured, "base_scale"),
            loss_in_half=measured.get("loss_in_half") is True,
            loss_amax=_number(measured.get("loss_amax"), "the profile's loss_amax"),
            nonfinite_steps=_nonfinite_steps(measured.get("nonfinite_steps"), steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFigures:
    """What a format does to a set of values at some loss scale.

    Attributes:
        flushed: Fraction of the nonzero finite values that becomes zero.
        subnormal: Fraction that keeps fewer bits than a normal number.
        overflowed: Fraction that the format cannot hold.
        relative_error: L2 norm of the rounding error over that of the values; inf with an overflow.
        zeros: Fraction of all values that are zero to begin with: not underflow.
    """

    flushed: float
    subnormal: float
    overflowed: float
    relative_error: float
    zeros: float


def site_entry(site: SiteRange) -> dict[str, Any]:
    """The part of a site's JSON entry that `RangeProfile.from_dict` reads."""
    return {
        "name": site.name,
        "kind": site.kind,
        "part": site.part,
        "half": site.half,
        "weight": site.weight,
        "histogram": dict(site.histogram),
        "amax_by_step": list(site.amax_by_step),
    }


def _site(entry: Any, index: int, steps: int) -> SiteRange:
    what = f"site {index} of the profile"
    if not isinstance(entry, Mapping):
        raise UsageError(f"{what} is no object")
    name, kind, part, series = entry.get("name"), entry.get("kind"), entry.get("part"), entry.get("amax_by_step")
    if not isinstance(name, str) or kind not in get_args(SiteKind) or part not in get_args(SitePart):
        raise UsageError(f"{what} has no name, kind or part that this ampdoctor knows")
    if not isinstance(entry.get("histogram"), Mapping) or not isinstance(series, list) or len(series) > steps:
        raise UsageError(f"{what} ({name}) lacks its histogram or its maxima by step, or has more of them than steps")
    maxima = tuple(_number(value, f"{what}: a maximum") for value in series)
    if any(value is not None and not value >= 0 for value in maxima):
        raise UsageError(f"{what} ({name}) has a negative magnitude, or one that is NaN")
    return SiteRange(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # one of its names: checked above
        part=part,  # type: ignore[arg-type]  # likewise
        half=entry.get("half") is True,
        weight=max(_whole(entry, "weight", what), 1),
        histogram=entry["histogram"],
        amax_by_step=maxima,
    )


def _scaler(state: Any) -> dict[str, Any] | None:
    """A scaler's state with numbers for its settings; a dead scale may be there as "NaN"."""
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise UsageError("the profile's scaler is no mapping")
    read = dict(state)
    for key in (*_SCALER_NUMBERS, *_SCALER_COUNTS):
        if key not in state:
            continue
        what = f"the profile's scaler: {key}"
        value = _number(state[key], what)
        if value is None or (key in _SCALER_COUNTS and not abs(value) < 2.0**63):
            raise UsageError(f"{what} is {_shown(state[key])}, not a number")
        if not isinstance(state[key], int):
            read[key] = value
    return read


def _nonfinite_steps(listed: Any, steps: int) -> tuple[int, ...]:
    whole = isinstance(listed, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in listed)
    if not whole or not all(0 <= s < steps for s in listed):
        raise UsageError(f"the profile's nonfinite_steps are no list of steps from 0 to {steps - 1}")
    return tuple(listed)


def _whole(data: Mapping[str, Any], key: str, what: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise UsageError(f"{what}: {key} is {_shown(value)}, not a count")
    return value


def _positive(data: Mapping[str, Any], key: str) -> float:
    value = _number(data.get(key), f"the profile's {key}")
    if value is None or not 1.0 / LARGEST_SCALE <= value <= LARGEST_SCALE:
        raise UsageError(f"the profile's {key} is {value!r}, not a positive number that a scale can be")
    return value


def _number(value: Any, what: str) -> float | None:
    """A JSON number or the string that stands for a non-finite one."""
    if value is None:
        return None
    if isinstance(value, str) and value in {"Infinity", "-Infinity", "NaN"}:
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise UsageError(f"{what} is {_shown(value)}, not a number that a float can hold")


def _shown(value: Any) -> str:
    """A value for a sentence: a number of a thousand digits would fill the screen."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
