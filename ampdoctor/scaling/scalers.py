"""The exact rules of each framework's dynamic loss scaler, over many scalers (lanes) at once, and its settings.

A scaler changes only when it grows or when a step overflows; in between it counts. Each rule set therefore computes the
clean steps to the next growth, and the effect of clean steps and overflows. Sources: torch 2.13
(`AmpGradScalerKernels.cpp`), DeepSpeed 0.19.8 (`runtime/fp16/loss_scaler.py`) and megatron-core 0.16.1
(`optimizer/grad_scaler.py`); tests compare with the real objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import frexp, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.targets import Framework
from ampdoctor.numerics.formats import FORMATS

# -- settings, named as in GradScaler; those of other frameworks are optional --


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """A GradScaler at some moment; the defaults are torch's."""

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0  # clean steps since the last growth or backoff
    min_scale: float | None = None  # backoff stops here; None if there is no floor, as in GradScaler
    hysteresis: int = 1  # overflows before a backoff (DeepSpeed, Megatron); 1 elsewhere

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> ScalerSettings:
        """Returns settings from `GradScaler.state_dict()`; missing ones are torch's defaults."""
        return cls(
            scale=float(state.get("scale", 65536.0)),
            growth_factor=float(state.get("growth_factor", 2.0)),
            backoff_factor=float(state.get("backoff_factor", 0.5)),
            growth_interval=int(state.get("growth_interval", 2000)),
            growth_tracker=int(state.get("_growth_tracker", 0)),
        )

    def arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of a GradScaler with this start."""
        return {
            "init_scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
        }


NEVER = 2**61  # more clean steps than any run has

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class ScalerSim(ABC):
    """Scalers that follow one rule set, one lane per entry of `settings`.

    `scale` is the loss scale of each lane before its next step, float64 of shape (lanes,). `stopped`, bool of that
    shape, is true where the scaler raised an exception, which ends the run.
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        self.scale = _floats(s.scale for s in settings)
        self.stopped = np.zeros(len(settings), bool)
        self._count = _integers(s.growth_tracker for s in settings)
        self._interval = _integers(s.growth_interval for s in settings)
        self._floor = _floats(s.min_scale or 1.0 for s in settings)
        self._hysteresis = self._left = _integers(s.hysteresis for s in settings)

    def clean(self, steps: Integers) -> None:
        """Runs 0 to `to_growth()` clean steps in each lane."""
        due = steps == self.to_growth()
        self._count = self._count + steps
        self._grow(due)

    def overflow(self, where: Flags) -> None:
        """Runs one step with an overflow in these lanes."""
        self._back_off(where)
        self._count = np.where(where, 0, self._count)

    @abstractmethod
    def to_growth(self) -> Integers:
        """Returns the clean steps up to and including the next that grows or stops the scaler: 1 to NEVER."""

    @abstractmethod
    def _grow(self, due: Flags) -> None: ...

    @abstractmethod
    def _back_off(self, where: Flags) -> None: ...


class GradScalerSim(ScalerSim):
    """`torch.amp.GradScaler`, also as accelerate and lightning use it: fp32, no floor.

    The count of clean steps is compared with `==`: an interval that is zero, negative, or not above the count is never
    reached. Growth to infinity is refused. A backoff factor of 0 or below gives a scale of 0 or a negative one.
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        super().__init__(settings)
        self.scale = fp32(self.scale)
        self._growth = _floats(s.growth_factor for s in settings)
        self._backoff = _floats(s.backoff_factor for s in settings)

    def to_growth(self) -> Integers:  # noqa: D102 - the base class says it
        return _by_equality(self._interval, self._count)

    def _grow(self, due: Flags) -> None:
        grown = fp32(self.scale * self._growth)
        self.scale = np.where(due & np.isfinite(grown), grown, self.scale)
        self._count = np.where(due, 0, self._count)

    def _back_off(self, where: Flags) -> None:
        self.scale = np.where(where, fp32(self.scale * self._backoff), self.scale)


class MegatronLanes(ScalerSim):
    """megatron-core's `DynamicGradScaler`: fp32, with a floor and hysteresis.

    Overflows use up the hysteresis even if clean steps lie between them: only growth refills it. Growth to infinity is
    not refused, and infinity is final. The factors are fixed at 2 and 1/2.
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        super().__init__(settings)
        self.scale = fp32(self.scale)
        self._floor = fp32(self._floor)

    def to_growth(self) -> Integers:  # noqa: D102 - the base class says it
        return _by_equality(self._interval, self._count)

    def _grow(self, due: Flags) -> None:
        self.scale = np.where(due, fp32(self.scale * 2.0), self.scale)
        self._left = np.where(due, self._hysteresis, self._left)
        self._count = np.where(due, 0, self._count)

    def _back_off(self, where: Flags) -> None:
        self._left = self._left - where
        lowered = np.maximum(fp32(self.scale / 2.0), self._floor)
        self.scale = np.where(where & (self._left <= 0), lowered, self.scale)


class DeepSpeedLanes(ScalerSim):
    """DeepSpeed's `DynamicLossScaler` (ZeRO 1 to 3), not consecutive: Python floats, a floor, hysteresis.

    It grows after interval + 1 clean steps from the start or an overflow, then after every interval. Only growth
    refills the hysteresis. An overflow that would back off at the floor raises, and so does any overflow at a
    non-finite scale (the log message needs an int). The factors are fixed at 2 and 1/2.
    """

    def to_growth(self) -> Integers:  # noqa: D102 - the base class says it
        done = np.maximum(self._count - 1, 0) // self._interval
        return (done + 1) * self._interval + 1 - self._count

    def _grow(self, due: Flags) -> None:
        self.scale = np.where(due, self.scale * 2.0, self.scale)
        self._left = np.where(due, self._hysteresis, self._left)

    def _back_off(self, where: Flags) -> None:
        lowers = where & (self._left == 1)
        raises = (lowers & (self.scale == self._floor)) | (where & ~np.isfinite(self.scale))
        self.scale = np.where(lowers & ~raises, np.maximum(self.scale / 2.0, self._floor), self.scale)
        self._left = self._left - (where & ~lowers)
        self.stopped |= raises


RULES: dict[Framework, type[ScalerSim]] = {
    "torch": GradScalerSim,
    "accelerate": GradScalerSim,
    "transformers": GradScalerSim,
    "lightning": GradScalerSim,
    "deepspeed": DeepSpeedLanes,
    "megatron": MegatronLanes,
}

_DEEPSPEED = ScalerSettings(scale=65536.0, growth_interval=1000, min_scale=1.0, hysteresis=2)
_TORCH = ScalerSettings()

DEFAULTS: dict[Framework, ScalerSettings] = {
    "torch": _TORCH,
    "accelerate": _TORCH,
    "transformers": _TORCH,
    "lightning": _TORCH,
    "deepspeed": _DEEPSPEED,
    "megatron": replace(_DEEPSPEED, scale=2.0**32),
}
"""Each scaler's settings by default."""


def expressible(settings: ScalerSettings, framework: Framework) -> ScalerSettings:
    """Returns the settings that the framework would run, as close to these as it allows.

    torch's scalers have neither floor nor hysteresis. DeepSpeed and Megatron always double and halve. DeepSpeed takes
    the power of two at or below the scale, but does not start below its floor of 1. A value that is not a number stays.
    """
    if RULES[framework] is GradScalerSim:
        return replace(settings, min_scale=None, hysteresis=1)
    fixed = replace(
        settings,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=max(1, settings.growth_interval),
        hysteresis=max(1, settings.hysteresis),
        min_scale=1.0,
    )
    if not 0.0 < settings.scale < inf:
        return fixed
    if framework == "deepspeed":
        return replace(fixed, scale=2.0 ** max(0, frexp(settings.scale)[1] - 1))
    return replace(fixed, min_scale=min(1.0, settings.scale))


def fp32(values: Floats) -> Floats:
    """Returns values rounded to float32, in float64; infinite beyond float32's range."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(np.float64)


def _by_equality(interval: Integers, count: Integers) -> Integers:
    """Returns the steps until the count equals the interval; NEVER if the count is there already, or beyond."""
    left = interval - count
    return np.where(left >= 1, left, NEVER)


def _floats(values: Iterable[float]) -> Floats:
    return np.array([float(v) for v in values], np.float64)


def _integers(values: Iterable[float]) -> Integers:
    return np.array([max(-NEVER, min(NEVER, int(v))) for v in values], np.int64)


# -- simulation over traces of gradient magnitudes --
#
# The walk leaps from one change of a scaler to the next, so its cost depends on the changes, not on the steps. torch's
# scaler has no floor: at a scale of 2^-128 and below, its inverse is infinite in fp32, and a clean step ruins the
# weights.


OVERFLOW_AT = FORMATS["fp16"].overflow_at
LEAP = 256
"""Longest leap, in steps: a window of this length finds the next overflow of every lane (256 and 512 were the fastest
of 32 to 512 for a few hundred lanes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Simulated scalers over traces; every array has the shape (settings, traces, steps)."""

    scale: Floats  # during each step; after the run's end, the last one
    skipped: Flags  # the optimizer did not step
    inf_in_weights: Flags  # it stepped on gradients multiplied by an infinite inverse
    ended: Flags  # the step was not run: the scaler had raised an exception


def simulate_lanes(settings: Sequence[ScalerSettings], maxima: NDArray[np.float64], framework: Framework) -> Simulation:
    """Simulates each scaler over each trace of largest unscaled half gradients, float64 of shape (traces, steps)."""
    traces, steps = maxima.shape
    trace_of_lane = np.tile(np.arange(traces), len(settings))
    lanes = RULES[framework]([s for s in settings for _ in range(traces)])
    shape = (len(settings), traces, steps)
    with np.errstate(all="ignore"):
        lengths, scales, kinds = _walk(lanes, trace_of_lane, maxima)
        poisons = np.isinf(fp32(1.0 / scales)) & (kinds == _TAKEN)
    lengths, kinds = lengths.ravel(), kinds.ravel()

    return Simulation(
        scale=np.repeat(scales.ravel(), lengths).reshape(shape),
        skipped=np.repeat(kinds == _SKIPPED, lengths).reshape(shape),
        inf_in_weights=np.repeat(poisons.ravel(), lengths).reshape(shape),
        ended=np.repeat(kinds == _ENDED, lengths).reshape(shape),
    )


_TAKEN, _SKIPPED, _ENDED = 0, 1, 2


def _walk(lanes: ScalerSim, trace_of_lane: Integers, maxima: Floats) -> tuple[Integers, Floats, NDArray[np.int8]]:
    """Returns lengths, scales and kinds of each lane's runs of equal steps, each of shape (lanes, runs)."""
    traces, steps = maxima.shape
    padded = np.concatenate([maxima, np.zeros((traces, LEAP))], axis=1)
    ahead = np.lib.stride_tricks.sliding_window_view(padded, LEAP, axis=1)
    at = np.zeros(len(trace_of_lane), np.int64)
    lengths, scales, kinds = [], [], []

    def note(length: Integers, kind: int) -> None:
        lengths.append(length)
        scales.append(lanes.scale)
        kinds.append(kind)

    while (live := np.flatnonzero((at < steps) & ~lanes.stopped)).size:
        free = np.zeros_like(at)
        free[live] = _clean_ahead(ahead[trace_of_lane[live], at[live]], lanes.scale[live])
        to_growth = lanes.to_growth()
        passed = np.minimum(np.minimum(free, to_growth), steps - at)
        passed[lanes.stopped] = 0
        note(passed, _TAKEN)
        lanes.clean(passed)
        at = at + passed
        # at the end of a leap without an overflow, or after a growth, the next step has to be checked first
        hit = (passed == free) & (free < LEAP) & (passed < to_growth) & (at < steps) & ~lanes.stopped
        note(hit.astype(np.int64), _SKIPPED)
        lanes.overflow(hit)
        at = at + hit
        stuck = hit & ~np.isfinite(lanes.scale) & ~lanes.stopped  # no factor makes it finite again
        note(np.where(stuck, steps - at, 0), _SKIPPED)
        at = np.where(stuck, steps, at)
    note(steps - at, _ENDED)
    kind_of_run = np.broadcast_to(np.array(kinds, np.int8), (len(at), len(kinds)))
    return np.stack(lengths, axis=1), np.stack(scales, axis=1), kind_of_run


def _clean_ahead(maxima: Floats, scale: Floats) -> Integers:
    """Returns the steps before the first overflow in each row of (lanes, steps); zero times infinity is one."""
    over = ~(maxima * np.abs(fp32(scale))[:, None] < OVERFLOW_AT)
    free: Integers = np.where(over.any(axis=1), over.argmax(axis=1), maxima.shape[1])
    return free
