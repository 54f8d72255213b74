"""The rules of each framework's dynamic loss scaler, exactly, over many scalers (lanes) at once; what it can be told.

A scaler changes only when it grows and when a step overflows; between the two it counts. Each rule set therefore says
how many clean steps are left to the next growth, and what clean steps and overflows do to it. They were read in torch
2.13 (`AmpGradScalerKernels.cpp`), DeepSpeed 0.19.8 (`runtime/fp16/loss_scaler.py`), megatron-core 0.16.1
(`optimizer/grad_scaler.py`) and fairseq 0.12.2 (`optim/dynamic_loss_scaler.py`), and are held to the real objects in
the tests. Settings that no one should use are simulated as well: each class says what they do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import frexp, isfinite

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.frameworks import Framework
from ampdoctor.scaling.settings import ScalerSettings

NEVER = 2**61
"""More clean steps than any run has."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Lanes(ABC):
    """Scalers that follow one rule set.

    Args:
        settings: One entry a lane.

    Attributes:
        scale: Loss scale of each lane before its next step, float64 of shape (lanes,).
        stopped: The scaler raised an exception, which ends the run; bool of shape (lanes,).
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        self.scale = _floats(s.scale for s in settings)
        self.stopped = np.zeros(len(settings), bool)
        self._count = _integers(s.growth_tracker for s in settings)

    def clean(self, steps: Integers) -> None:
        """Let clean steps pass: 0 to `to_growth()` in each lane."""
        due = steps == self.to_growth()
        self._count = self._count + steps
        self._grow(due)

    def overflow(self, where: Flags) -> None:
        """One step with an overflow, in these lanes."""
        self._back_off(where)
        self._count = np.where(where, 0, self._count)

    @abstractmethod
    def to_growth(self) -> Integers:
        """Clean steps up to the next one that grows or stops the scaler, that one included: 1 to NEVER."""

    @abstractmethod
    def _grow(self, due: Flags) -> None: ...

    @abstractmethod
    def _back_off(self, where: Flags) -> None: ...


class TorchLanes(Lanes):
    """`torch.amp.GradScaler`, and what accelerate, lightning and FSDP1 make of it: fp32, no floor.

    The count of clean steps is compared with `==`: an interval at or below the count, zero or negative never comes
    round. Growth to infinity is refused. A backoff factor of 0 or below gives the scale 0 or a negative one. An
    interval that is not an int is a TypeError at the first update.
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        super().__init__(settings)
        self.scale = fp32(self.scale)
        self._growth = _floats(s.growth_factor for s in settings)
        self._backoff = _floats(s.backoff_factor for s in settings)
        self._raises = np.array([not isinstance(s.growth_interval, int) for s in settings], bool)
        self._interval = _integers(s.growth_interval if isinstance(s.growth_interval, int) else 0 for s in settings)

    def to_growth(self) -> Integers:  # noqa: D102 - the base class says it
        return np.where(self._raises, 1, _by_equality(self._interval, self._count))

    def _grow(self, due: Flags) -> None:
        grown = fp32(self.scale * self._growth)
        self.scale = np.where(due & ~self._raises & np.isfinite(grown), grown, self.scale)
        self._count = np.where(due, 0, self._count)
        self.stopped |= due & self._raises

    def _back_off(self, where: Flags) -> None:
        self.scale = np.where(where & ~self._raises, fp32(self.scale * self._backoff), self.scale)
        self.stopped |= where & self._raises


class MegatronLanes(Lanes):
    """megatron-core's `DynamicGradScaler`: fp32, with a floor and hysteresis.

    Overflows spend the hysteresis also when clean steps lie between them: only growth refills it. Growth to infinity is
    not refused, and infinity is final. The interval is compared with `==`: one that is no whole number never comes
    round. What its constructor refuses (a scale, floor, interval or hysteresis of 0 or below, a floor above the scale)
    is simulated by the same rules. The factors are fixed at 2 and 1/2.
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        super().__init__(settings)
        self.scale = fp32(self.scale)
        self._floor = fp32(_floors(s.min_scale for s in settings))
        self._interval = _integers(s.growth_interval if s.growth_interval % 1 == 0 else 0 for s in settings)
        self._hysteresis = _integers(s.hysteresis for s in settings)
        self._left = self._hysteresis

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


class DeepSpeedLanes(Lanes):
    """DeepSpeed's `DynamicLossScaler` (ZeRO 1 to 3), not consecutive: Python floats, a floor, hysteresis.

    It grows after interval + 1 clean steps from the start or an overflow, then after every interval. Only growth
    refills the hysteresis; one below 1 never lets it back off. An overflow at the floor that would back off raises; so
    does any at a scale that is not finite (its log message wants an int). An interval of 0 is a ZeroDivisionError at
    the second clean step, a negative one counts as its magnitude, and of 2.5 every multiple that is whole counts (its
    configuration refuses all of these). The factors are fixed at 2 and 1/2.
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        super().__init__(settings)
        self._floor = _floors(s.min_scale for s in settings)
        self._period = _integers(_period(s.growth_interval) for s in settings)
        self._hysteresis = _integers(s.hysteresis for s in settings)
        self._left = self._hysteresis

    def to_growth(self) -> Integers:  # noqa: D102 - the base class says it
        period = np.maximum(self._period, 1)  # 0 raises where an interval of 1 would grow
        done = np.maximum(self._count - 1, 0) // period
        return (done + 1) * period + 1 - self._count

    def _grow(self, due: Flags) -> None:
        raises = due & (self._period == 0)
        self.scale = np.where(due & ~raises, self.scale * 2.0, self.scale)
        self._left = np.where(due, self._hysteresis, self._left)
        self.stopped |= raises

    def _back_off(self, where: Flags) -> None:
        lowers = where & (self._left == 1)
        raises = (lowers & (self.scale == self._floor)) | (where & ~np.isfinite(self.scale))
        self.scale = np.where(lowers & ~raises, _larger(self.scale / 2.0, self._floor), self.scale)
        self._left = self._left - (where & ~lowers)
        self.stopped |= raises


class FairseqLanes(Lanes):
    """fairseq's `DynamicLossScaler`: Python floats; `min_scale` is its soft threshold, `abort_scale` its minimum.

    It backs off where overflows are at least the share `tolerance` of the steps since the scale last changed (growth
    does not forget the overflows counted before it). An overflow that leaves the scale at or below the minimum is a
    FloatingPointError. Intervals count as DeepSpeed's do, without its + 1. The factors are fixed at 2 and 1/2.
    """

    def __init__(self, settings: Sequence[ScalerSettings]) -> None:
        super().__init__(settings)
        self._threshold = _floors(s.min_scale for s in settings)
        self._minimum = _floors(s.abort_scale for s in settings)
        self._tolerance = _floats(s.tolerance for s in settings)
        self._period = _integers(_period(s.growth_interval) for s in settings)
        self._overflows = np.zeros(len(settings), np.int64)
        self._since_change = self._count

    def clean(self, steps: Integers) -> None:  # noqa: D102 - the base class says it
        self._since_change = self._since_change + steps
        super().clean(steps)

    def to_growth(self) -> Integers:  # noqa: D102 - the base class says it
        period = np.maximum(self._period, 1)
        return period - self._count % period

    def _grow(self, due: Flags) -> None:
        raises = due & (self._period == 0)
        self.scale = np.where(due & ~raises, self.scale * 2.0, self.scale)
        self._since_change = np.where(due, 0, self._since_change)
        self.stopped |= raises

    def _back_off(self, where: Flags) -> None:
        self._since_change = self._since_change + where
        self._overflows = self._overflows + where
        lowers = where & (self._overflows / np.maximum(self._since_change, 1) >= self._tolerance)
        lowered = np.where(lowers, _larger(self.scale / 2.0, self._threshold), self.scale)
        raises = where & (lowered <= self._minimum)
        self.scale = np.where(raises, self.scale, lowered)
        self._since_change = np.where(lowers, 0, self._since_change)
        self._overflows = np.where(lowers, 0, self._overflows)
        self.stopped |= raises


RULES: dict[Framework, type[Lanes]] = {
    "torch": TorchLanes,
    "accelerate": TorchLanes,
    "lightning": TorchLanes,
    "fsdp": TorchLanes,
    "deepspeed": DeepSpeedLanes,
    "megatron": MegatronLanes,
    "fairseq": FairseqLanes,
}

_DEEPSPEED = ScalerSettings(scale=65536.0, growth_interval=1000, min_scale=1.0, hysteresis=2)
_TORCH = ScalerSettings()

DEFAULTS: dict[Framework, ScalerSettings] = {
    "torch": _TORCH,
    "accelerate": _TORCH,
    "lightning": _TORCH,
    "fsdp": _TORCH,
    "deepspeed": _DEEPSPEED,
    "megatron": replace(_DEEPSPEED, scale=2.0**32),
    "fairseq": ScalerSettings(scale=128.0, growth_interval=2**14, abort_scale=1e-4),
}
"""What each scaler does when nothing is set; fairseq's interval is divided by data parallel size and update_freq."""


def expressible(settings: ScalerSettings, framework: Framework) -> ScalerSettings:
    """The settings as the framework would run them, were they written down as nearly as it allows.

    torch's scalers have neither floor nor hysteresis. DeepSpeed, Megatron and fairseq double and halve, whatever is
    asked. DeepSpeed takes the power of two at or below the scale, and a whole floor of at least 1, below which it does
    not start; Megatron a positive floor, at most the scale; fairseq a whole scale of at least 1, `min_scale` as the
    threshold, and no hysteresis (its tolerance is no stand-in: after 1,000 clean steps, 5 % ignores 50 overflows in a
    row). What is not a number to begin with is left as it is.

    Args:
        settings: Asked for.
        framework: Whose scaler it will be.
    """
    if RULES[framework] is TorchLanes:
        return replace(settings, min_scale=None, hysteresis=1, tolerance=0.0, abort_scale=None)
    defaults = DEFAULTS[framework]
    fixed = replace(
        settings,
        growth_factor=defaults.growth_factor,
        backoff_factor=defaults.backoff_factor,
        growth_interval=_at_least_one(settings.growth_interval),
        hysteresis=_at_least_one(settings.hysteresis),
        tolerance=0.0,
        abort_scale=None,
    )
    usable = settings.scale > 0.0 and isfinite(settings.scale)
    floor = settings.min_scale if settings.min_scale is not None else defaults.min_scale
    if framework == "deepspeed":
        least = _at_least_one(floor or 1.0)
        power = min(max(frexp(settings.scale)[1] - 1, (least - 1).bit_length()), 1023)  # the largest of a float
        return replace(fixed, scale=2.0**power if usable else settings.scale, min_scale=float(least))
    if framework == "megatron":
        floor = floor if floor is not None and floor > 0.0 else 1.0
        return replace(fixed, min_scale=min(floor, settings.scale) if usable else floor)
    return replace(
        fixed,
        scale=float(_at_least_one(settings.scale)) if usable else settings.scale,
        growth_tracker=0,  # its checkpoints keep the scale alone
        hysteresis=1,
        tolerance=settings.tolerance,
        abort_scale=settings.abort_scale if settings.abort_scale is not None else defaults.abort_scale,
    )


def _at_least_one(value: float) -> int:
    return max(1, int(value)) if isfinite(value) else 1


def fp32(values: Floats) -> Floats:
    """Rounded to float32, kept in float64; infinite where float32 has no such number."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(np.float32).astype(np.float64)


def _by_equality(interval: Integers, count: Integers) -> Integers:
    """Steps until the count equals the interval; NEVER where it is there already, or beyond."""
    left = interval - count
    return np.where(left >= 1, left, NEVER)


def _floors(values: Iterable[float | None]) -> Floats:
    return _floats(-np.inf if v is None else v for v in values)


def _larger(values: Floats, floors: Floats) -> Floats:
    return np.where(floors > values, floors, values)  # Python's max(value, floor), which keeps a NaN


def _floats(values: Iterable[float]) -> Floats:
    return np.array([float(v) for v in values], np.float64)


def _integers(values: Iterable[float]) -> Integers:
    return np.array([max(-NEVER, min(NEVER, int(v))) for v in values], np.int64)


def _period(interval: float) -> int:
    """The smallest positive whole number n with n % interval == 0: where such an interval comes round."""
    return abs(Fraction(interval).numerator) if isfinite(interval) else NEVER
