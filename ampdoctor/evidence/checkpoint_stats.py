"""Measurements of a checkpoint, of its optimizers, of two checkpoints, and of a series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ampdoctor.evidence.json_records import UNWRITTEN, Count, Fraction

# -- an optimizer's state, without the values of its moments --


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """Settings of one parameter group; None if the group has no such number."""

    learning_rate: float | None = None
    betas: tuple[float, ...] = ()  # () for an optimizer without
    epsilon: float | None = None
    weight_decay: float | None = None
    fused: bool = False  # computes in fp32 whatever the state's dtype
    parameters: int = 0  # number in the group


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSecondMoment:
    """A second moment that holds zeros at elements where its first moment does not."""

    name: str
    module: str
    group: str
    file: str
    entry: str  # the second moment ("exp_avg_sq")
    dtype: str  # without "torch."
    starved: int  # these elements
    examined: int
    largest: float  # largest magnitude of the first moment there; 0.0 without one


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSummary:
    """An optimizer's state in numbers; `path` begins with its file if several have one path."""

    path: str
    groups: tuple[OptimizerGroup, ...] = ()
    steps: tuple[tuple[float, int], ...] = ()  # (steps, number of parameters with that many), ascending
    step_dtypes: tuple[str, ...] = ()  # of step counters that are tensors, without "torch."
    starved: tuple[ZeroSecondMoment, ...] = ()  # second moments that may hold such zeros


TensorRole = Literal["weight", "buffer", "ema", "moment", "scaler", "other"]
"""A tensor's purpose. `ema` is an averaged copy of the weights and buffers beside the model itself; `moment` is
optimizer state with one value per parameter element; `other` is optimizer counters and loose tensors."""

ROLES: tuple[TensorRole, ...] = ("weight", "buffer", "ema", "moment", "scaler", "other")

DEAD_SCALE = 2.0**-128
"""At and below this scale 1/scale is infinite in fp32, and a clean step writes infinities (measured, torch 2.13)."""


def is_dead(scale: float) -> bool:
    """Whether no step can be right with this scale: it is infinite or NaN, or its inverse is infinite in fp32."""
    return not (math.isfinite(scale) and abs(scale) > DEAD_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """The state of a dynamic loss scaler (`torch.amp.GradScaler.state_dict()` or another framework's equivalent)."""

    scale: float
    growth_factor: float = 2.0  # multiplier after `growth_interval` clean steps
    backoff_factor: float = 0.5  # multiplier after an overflow
    growth_interval: int = 2000
    growth_tracker: int = 0  # clean steps since the last growth or backoff
    key: str = "scaler"  # in the file
    file: str = ""  # relative to what was scanned; "" without a file
    min_scale: float | None = None  # its floor; None if it has none (GradScaler) or did not save it

    @property
    def dead(self) -> bool:
        """Whether no step can be right with this scale."""
        return is_dead(self.scale)

    @property
    def collapsed(self) -> bool:
        """Whether the scale shrinks gradients (below 1), without being dead. A factory may have chosen one so low."""
        return 0 < self.scale < 1 and not self.dead


@dataclass(frozen=True, slots=True, kw_only=True)
class CastShares:
    """Shares of the nonzero finite elements that a cast would make so.

    Attributes:
        flushed: Share of what is not zero that becomes zero.
        subnormal: Share that keeps fewer bits.
        overflowed: Share that does not fit.
    """

    flushed: Fraction
    subnormal: Fraction
    overflowed: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class CastLoss(CastShares):
    """What a cast to a format would do to stored values; fractions are of the nonzero finite elements."""

    format: str = field(metadata=UNWRITTEN)  # "fp16"
    relative_error: float = field(metadata=UNWRITTEN)  # L2, of the rounding error over the values
    headroom: float | None = field(metadata=UNWRITTEN)  # log2 of the largest number over the largest magnitude


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """A tensor that a scan has examined, in numbers.

    Attributes:
        name: As in named_parameters() or named_buffers(); for a moment the name of its parameter.
        role: What the tensor is for.
        entry: Last part of the address: weight, running_mean, exp_avg_sq.
        module: The module that it belongs to, by its name.
        group: Which of several models in the file, or which optimizer.
        file: The file that it lies in.
        dtype: The stored format.
        shape: Size of each dimension.
        examined: Distinct stored elements that were looked at.
        counted: Elements among them that were sorted by magnitude: all of a small tensor, an even sample of a
            large one.
        zeros: Zeros among the counted elements.
        nan: NaN elements.
        inf: Infinite elements.
        at_max: Elements whose magnitude is exactly the stored format's largest finite number.
        amax: Largest finite magnitude; None without a nonzero finite element.
        amin: Smallest nonzero magnitude among the counted elements; None without one.
        fp16: What a cast to fp16 would do; None where it would only round.
        bf16: What a cast to bf16 would do; None where it would only round.
    """

    name: str
    role: TensorRole
    entry: str
    module: str
    group: str
    file: str
    dtype: str
    shape: tuple[Count, ...]
    examined: Count
    counted: Count
    zeros: Count
    nan: Count
    inf: Count
    at_max: Count = 0
    amax: float | None
    amin: float | None
    fp16: CastShares | None = None
    bf16: CastShares | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary(TensorRow):
    """One tensor of a checkpoint in numbers: its row in the report, and more for the rules.

    `fp16` and `bf16` are known where its values leave the format's normal range; inside it a cast only rounds.
    """

    neg_infs: int = field(default=0, metadata=UNWRITTEN)
    negatives: int | None = field(default=None, metadata=UNWRITTEN)  # None unless the tensor cannot be negative
    lowest: float | None = field(default=None, metadata=UNWRITTEN)  # the smallest negative element
    constant: float | None = field(default=None, metadata=UNWRITTEN)  # the value of all elements, if there are several
    fp16: CastLoss | None = None
    bf16: CastLoss | None = None

    @property
    def blank(self) -> bool:
        """True if every element is zero."""
        return self.examined > 0 and self.amax is None and not self.nonfinite

    @property
    def pos_infs(self) -> int:
        """Number of positive infinities."""
        return self.inf - self.neg_infs

    @property
    def nonfinite(self) -> int:
        """Number of NaNs and infinities."""
        return self.nan + self.inf

    @property
    def casts(self) -> tuple[CastLoss, ...]:
        """What is known of casts to the half formats."""
        return tuple(loss for loss in (self.fp16, self.bf16) if loss is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSummary:
    """All examined tensors of one role together."""

    role: TensorRole
    tensors: int  # number of tensors
    elements: int  # number of examined elements
    amax: float | None  # largest finite magnitude; None without a nonzero one
    amin: float | None  # smallest nonzero magnitude
    casts: tuple[CastLoss, ...]  # the effect of casting all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """A small buffer of whole numbers: a counter, or a table of positions."""

    name: str
    entry: str
    module: str
    group: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    lowest: float
    displaced: int  # elements that differ from their position along the last dimension; 0 for counters
    rounded_as: str = ""  # the half format whose rounding of the positions gives exactly these values


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    """The last numbers of a training log."""

    norms: tuple[float, ...] = ()  # the last gradient norms, before clipping, that are finite and not zero
    scale: float | None = None  # the last loss scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNumbers:
    """Numbers outside of weights and moments, some NaN or infinite: a loss, a metric, a list of losses."""

    name: str  # dotted path in the file
    count: int  # how many numbers there are
    nans: int
    infs: int
    last: float
    file: str = ""  # relative to what was opened


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A whole checkpoint in numbers; `format` is as in a report's target."""

    format: str
    tensors: tuple[TensorSummary, ...]  # in the order of the files
    roles: tuple[RoleSummary, ...] = ()  # totals in the order of `ROLES`, without empty roles
    scalers: tuple[ScalerState, ...] = ()
    global_step: int | None = None
    steps: Mapping[str, int | None] = field(default_factory=dict)  # of each file, where these differ
    loss: float | None = None  # saved with the weights
    log: LogTail | None = None  # of the training log beside them
    optimizers: tuple[OptimizerSummary, ...] = ()
    indices: tuple[IndexSummary, ...] = ()  # counters and tables of positions among its buffers
    unsafe_globals: tuple[str, ...] = ()  # names that `torch.load(weights_only=True)` refuses
    lost: tuple[LostNumbers, ...] = ()  # other numbers that are not finite

    def step_of(self, file: str | None) -> int | None:
        """Returns the step of one of its files."""
        return self.global_step if file is None else self.steps.get(file, self.global_step)


# -- changes since an earlier checkpoint --


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReach:
    """How many elements of a weight one optimizer step would change, given the format it is stored in."""

    learning_rate: float  # the larger of the two checkpoints'
    changed_by_one: float  # share of the elements
    changed_by_many: float  # by `steps` updates, summed exactly and rounded once
    steps: int  # between them, and at least 1000 unless a schedule has lowered the rate
    rms: float  # root mean square of the update


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor in both checkpoints, compared after exact widening; its names are those of the newer one."""

    name: str
    role: TensorRole
    entry: str
    module: str
    group: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    old_dtype: str
    elements: int  # number of compared elements
    unchanged: int  # elements of equal value; NaN equals NaN
    change_norm: float  # |new - old| in L2 over the elements that are finite in both
    old_norm: float  # |old|, likewise
    amax: float | None  # largest finite magnitude; None without a nonzero one
    old_amax: float | None
    nonfinite: int  # elements that are NaN or infinite
    old_nonfinite: int
    moments: bool = False  # the newer one has nonzero optimizer state for it
    pure_half: bool = False  # stored with its moments in one 16-bit format: no more exact copy is updated
    reach: UpdateReach | None = None  # None if not needed, or the rule or rate is unknown

    @property
    def relative_change(self) -> float | None:
        """|new - old| / |old|; None if only the old norm is 0."""
        return relative(self.change_norm, self.old_norm)

    @property
    def address(self) -> str:
        """Its name, after that of its group."""
        return f"{self.group}.{self.name}" if self.group else self.name


def relative(change_norm: float, old_norm: float) -> float | None:
    """Returns one norm divided by the other: 0 if nothing changed, None if there was nothing before."""
    if not change_norm:
        return 0.0
    return change_norm / old_norm if old_norm else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChange:
    """Two checkpoints of one training."""

    old: str  # its name
    new: str
    old_step: int | None
    new_step: int | None
    tensors: tuple[TensorChange, ...]  # all that were compared
    appeared: tuple[str, ...] = ()  # addresses of weights and buffers only in the newer one
    vanished: tuple[str, ...] = ()  # only in the older one
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # sizes before and after, by address
    old_scale: float | None = None  # loss scale
    new_scale: float | None = None

    @property
    def steps(self) -> int | None:
        """Number of optimizer steps between them; None if one of the steps is unknown."""
        if self.old_step is None or self.new_step is None:
            return None
        return self.new_step - self.old_step


# -- several checkpoints of one training --


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest finite magnitude of a tensor in one checkpoint."""

    amax: float
    cast_by_autocast: bool  # fp16 autocast would cast it, or it is fp16: beyond fp16 it becomes Inf
    module: str
    entry: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendPoint:
    """One checkpoint of a training."""

    name: str
    step: int | None  # None if unknown; all points of a trend use one unit
    roles: tuple[RoleSummary, ...] = ()
    scale: float | None = None
    loss: float | None = None  # the last one logged up to then
    largest: Mapping[str, Largest] = field(default_factory=dict)  # of every weight and buffer except masks, by address


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Several checkpoints of one training, in order."""

    points: Sequence[TrendPoint]
    unit: str = "step"  # of their steps, for sentences

    @property
    def dated(self) -> list[TrendPoint]:
        """The points with a known step."""
        return [point for point in self.points if point.step is not None]
