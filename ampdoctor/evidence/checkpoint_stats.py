"""What was measured of a checkpoint, of its optimizers, of two checkpoints, and of a series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Facts about an optimizer's saved state besides the values of its moments: plain data.


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """Settings of one parameter group; None if the group has no such number.

    Attributes:
        learning_rate: `lr`.
        betas: Decay rates of the moments; () for an optimizer without.
        epsilon: `eps`.
        weight_decay: `weight_decay`.
        fused: True for the fused implementation, which computes in fp32 whatever the state's dtype.
        capturable: True for one that CUDA graphs can record; torch loads its step counters, and a fused one's, as fp32.
        parameters: Number of parameters in the group.
    """

    learning_rate: float | None = None
    betas: tuple[float, ...] = ()
    epsilon: float | None = None
    weight_decay: float | None = None
    fused: bool = False
    capturable: bool = False
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StarvedMoment:
    """A second moment that holds zeros at elements where its first moment does not.

    Attributes:
        name, module, group, file: As in `TensorSummary`.
        entry: The second moment ("exp_avg_sq").
        dtype: Its stored dtype without "torch.".
        starved: Number of elements that are zero there and nonzero in the first moment.
        examined: Number of compared elements.
        largest: Largest magnitude of the first moment at such an element; 0.0 without one.
    """

    name: str
    module: str
    group: str
    file: str
    entry: str
    dtype: str
    starved: int
    examined: int
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSummary:
    """An optimizer's state in numbers.

    Attributes:
        path: Its path ("optimizer"), with its file if several have one path.
        groups: Its parameter groups.
        steps: Number of parameters by number of steps, as (step, parameters), ascending.
        step_dtypes: Dtypes of the step counters that are tensors, without "torch.".
        starved: Second moments that may hold zeros beside nonzero first moments, with what was found there.
    """

    path: str
    groups: tuple[OptimizerGroup, ...] = ()
    steps: tuple[tuple[float, int], ...] = ()
    step_dtypes: tuple[str, ...] = ()
    starved: tuple[StarvedMoment, ...] = ()


TensorRole = Literal["weight", "buffer", "ema", "moment", "scaler", "other"]
"""A tensor's purpose. `ema` is an averaged copy of the weights and buffers beside the model itself; `moment` is
optimizer state with one value per parameter element; `other` is optimizer counters and loose tensors."""

ROLES: tuple[TensorRole, ...] = ("weight", "buffer", "ema", "moment", "scaler", "other")

RUN_LOG = "run-log"
"""The format of what is no checkpoint: the log that ampdoctor has written of a run."""

DEAD_SCALE = 2.0**-128
"""At and below this scale 1/scale is infinite in fp32, and a clean step writes infinities (measured, torch 2.13)."""


def is_dead(scale: float) -> bool:
    """No step can be right with this scale: it is infinite or NaN, or its inverse is infinite in fp32."""
    return not (math.isfinite(scale) and abs(scale) > DEAD_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """The state of a dynamic loss scaler (`torch.amp.GradScaler.state_dict()` or another framework's equivalent).

    Attributes:
        scale: Current loss scale.
        growth_factor: Multiplier after `growth_interval` clean steps.
        backoff_factor: Multiplier after an overflow.
        growth_interval: Clean steps between two growths.
        growth_tracker: Clean steps since the last growth or backoff.
        key: Its key in the file ("scaler").
        file: The file that holds it, relative to what was scanned; "" without a file.
        min_scale: The floor below which it does not go; None if it has none, like GradScaler, or it was not saved.
    """

    scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0
    key: str = "scaler"
    file: str = ""
    min_scale: float | None = None

    @property
    def dead(self) -> bool:
        """True if no step can be right with this scale."""
        return is_dead(self.scale)

    @property
    def collapsed(self) -> bool:
        """Does the scale shrink gradients (below 1), without being dead? A factory may have chosen one so low."""
        return 0 < self.scale < 1 and not self.dead


@dataclass(frozen=True, slots=True, kw_only=True)
class CastLoss:
    """What a cast to a format would do to stored values; fractions (0 to 1) are of the nonzero finite elements.

    Attributes:
        format: Name of the format ("fp16").
        flushed: Fraction that becomes zero.
        subnormal: Fraction that stays nonzero below the smallest normal number, where bits are lost.
        overflowed: Fraction that is not representable.
        relative_error: L2 norm of the rounding error over the L2 norm of the values.
        headroom: Binades between the largest magnitude and the format's largest number; negative beyond it, None
            without a nonzero value.
    """

    format: str
    flushed: float
    subnormal: float
    overflowed: float
    relative_error: float
    headroom: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary:
    """One tensor of a checkpoint in numbers.

    Attributes:
        name: Name as in `named_parameters()` or `named_buffers()`; for a moment the name of its parameter.
        role: Its purpose.
        entry: The last part of the address: "weight", "running_mean", "exp_avg_sq".
        module: The owner, as in `named_modules()`; "" for the root or if unknown.
        group: Name of its model in the file ("ema"), or of its optimizer; "" for the main one.
        file: File relative to what was scanned.
        dtype: Stored dtype without "torch." ("float16").
        shape: Sizes.
        examined: Number of distinct stored elements that were read.
        counted: Number of them that were sorted by magnitude: all of a small tensor, an even sample of a large one.
        zeros: Zeros among the counted elements.
        nans, pos_infs, neg_infs: Exact counts.
        amax: Largest finite magnitude, exact; None without a nonzero finite element.
        amin: Smallest nonzero magnitude among the counted elements; None without one.
        negatives: Elements below zero; counted only for tensors that cannot be negative, else None.
        lowest: The smallest of these, None if `negatives` is None or 0.
        at_max: Elements whose magnitude is exactly the stored format's largest finite number.
        constant: The value that every element has; None if they differ, and for a single element.
        binades: Distance from its largest magnitude to the one that 99 % of its nonzero elements reach: the span that a
            format with one scale per tensor needs (fp8); None without a nonzero finite element.
        casts: One entry per format whose normal range its values leave; inside that range a cast only rounds.
    """

    name: str
    role: TensorRole
    entry: str
    module: str
    group: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    examined: int
    counted: int
    zeros: int
    nans: int
    pos_infs: int
    neg_infs: int
    amax: float | None
    amin: float | None
    negatives: int | None = None
    lowest: float | None = None
    at_max: int = 0
    constant: float | None = None
    binades: float | None = None
    casts: tuple[CastLoss, ...] = ()

    @property
    def blank(self) -> bool:
        """True if every element is zero."""
        return self.examined > 0 and self.amax is None and not self.nonfinite

    @property
    def infs(self) -> int:
        """Number of infinities of either sign."""
        return self.pos_infs + self.neg_infs

    @property
    def nonfinite(self) -> int:
        """Number of NaNs and infinities."""
        return self.nans + self.infs

    def cast(self, name: str) -> CastLoss | None:
        """Returns the entry of `casts` for a format, if it was measured."""
        return next((c for c in self.casts if c.format == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSummary:
    """All examined tensors of one role together.

    Attributes:
        role: The role.
        tensors: Number of tensors.
        elements: Number of examined elements.
        amax, amin: Largest and smallest nonzero finite magnitude; None without one.
        casts: The effect of casting all of them.
    """

    role: TensorRole
    tensors: int
    elements: int
    amax: float | None
    amin: float | None
    casts: tuple[CastLoss, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """A small buffer of whole numbers: a counter, or a table of positions.

    Attributes:
        name, entry, module, group, file, dtype, shape: As in `TensorSummary`.
        lowest: Its smallest value.
        displaced: Elements that differ from their position along the last dimension (0, 1, 2, ...); NaN differs.
            Counters have none.
        rounded_as: The half format ("bf16", "fp16") whose rounding of the positions gives exactly these values; "" if
            they are right, or wrong in another way.
    """

    name: str
    entry: str
    module: str
    group: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    lowest: float
    displaced: int
    rounded_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One line of a training log stored beside the weights; a value that the log lacks is None.

    Attributes:
        step: Global step.
        loss: Training loss.
        grad_norm: Global gradient norm before clipping.
        learning_rate: Learning rate.
        scale: Loss scale.
        skipped: Whether the optimizer's step was left out.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None = None
    scale: float | None = None
    skipped: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNumbers:
    """Numbers outside of weights and moments of which some are NaN or infinite: a loss, a metric, a list of losses.

    Attributes:
        name: Dotted path in the file.
        count: How many numbers are there.
        nans: How many are NaN.
        infs: How many are infinite.
        last: The last of them; the only one where there is one.
        file: File, relative to what was opened.
    """

    name: str
    count: int
    nans: int
    infs: int
    last: float
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A whole checkpoint in numbers.

    Attributes:
        format: "safetensors", "torch-zip", "torch-legacy", "sharded", a folder's layout if names tell it ("hf-trainer",
            "accelerate", "deepspeed", "torch-dcp", ...), else "folder".
        tensors: Every examined tensor, in the order of the files.
        roles: Totals by role, in the order of `ROLES`, without roles that have no tensor.
        scalers: Loss scalers found.
        global_step: The training step stored in it, if any.
        log: The training log stored beside it, in the order of the steps.
        optimizers: Optimizers found.
        indices: Counters and tables of positions among its buffers.
        foreign: Names of its classes and functions that `torch.load(weights_only=True)` refuses.
        lost: Its other numbers that are not finite.
    """

    format: str
    tensors: tuple[TensorSummary, ...]
    roles: tuple[RoleSummary, ...] = ()
    scalers: tuple[ScalerState, ...] = ()
    global_step: int | None = None
    log: tuple[LogEntry, ...] = ()
    optimizers: tuple[OptimizerSummary, ...] = ()
    indices: tuple[IndexSummary, ...] = ()
    foreign: tuple[str, ...] = ()
    lost: tuple[LostNumbers, ...] = ()


# How a checkpoint's tensors changed since an earlier one: plain data.


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReach:
    """What the next update would do to a weight, from the optimizer's moments and learning rate; shares of elements.

    Attributes:
        learning_rate: The larger of those stored in the two checkpoints.
        lands: Elements whose stored value one such update changes.
        adds_up: Elements whose stored value would change if `steps` such updates were summed exactly and rounded once.
        steps: Steps between the two checkpoints, and at least 1000 unless a schedule has lowered the rate.
        rms: Root mean square of the update.
    """

    learning_rate: float
    lands: float
    adds_up: float
    steps: int
    rms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """One tensor in both checkpoints.

    Attributes:
        name, role, entry, module, group, file: As in `TensorSummary`, for the newer one.
        shape: Sizes, equal in both.
        dtype, old_dtype: Stored dtypes; values are compared after exact widening.
        elements: Number of compared elements.
        unchanged: Elements with exactly the same value; NaN counts as equal to NaN.
        change_norm, old_norm: |new - old| and |old| in L2 over the elements that are finite in both.
        amax, old_amax: Largest finite magnitudes; None without a nonzero finite element.
        nonfinite, old_nonfinite: Elements that are NaN or infinite.
        moments: True if the newer checkpoint holds optimizer state for it that is not all zero.
        pure_half: True if the weight and its moments are stored in one 16-bit format, so that no more exact copy is
            updated in its place.
        reach: The effect of an update; None if it was not needed, or the optimizer's rule or rate is unknown.
    """

    name: str
    role: TensorRole
    entry: str
    module: str
    group: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    old_dtype: str
    elements: int
    unchanged: int
    change_norm: float
    old_norm: float
    amax: float | None
    old_amax: float | None
    nonfinite: int
    old_nonfinite: int
    moments: bool = False
    pure_half: bool = False
    reach: UpdateReach | None = None

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
    """Two checkpoints of one training.

    Attributes:
        old, new: Their names.
        old_step, new_step: Their stored steps, if known.
        tensors: Every compared tensor.
        appeared, vanished: Addresses of weights and buffers that only the newer or only the older one has.
        reshaped: Sizes before and after, by address.
        old_scale, new_scale: Loss scales, if stored.
    """

    old: str
    new: str
    old_step: int | None
    new_step: int | None
    tensors: tuple[TensorChange, ...]
    appeared: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    old_scale: float | None = None
    new_scale: float | None = None

    @property
    def steps(self) -> int | None:
        """Number of optimizer steps between them; None if one of the steps is unknown."""
        if self.old_step is None or self.new_step is None:
            return None
        return self.new_step - self.old_step


# What several checkpoints of one training show together: plain data.


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest finite magnitude of a tensor at one moment.

    Attributes:
        amax: The magnitude.
        cast_by_autocast: True if fp16 autocast would cast this tensor, or its format is fp16 itself: it becomes Inf if
            it grows beyond fp16.
        module: Its owner, as in `named_modules()`.
        entry: The last part of its address.
        file: The file that holds it.
    """

    amax: float
    cast_by_autocast: bool
    module: str
    entry: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendPoint:
    """One checkpoint of a training.

    Attributes:
        name: Its name, for people.
        step: When it was saved; points of one trend count in one unit. None if unknown.
        roles: Totals by role.
        scale: Loss scale; None without a scaler.
        loss: The log's last loss up to then; None without one.
        largest: Largest magnitude of every weight and buffer except masks, by address.
    """

    name: str
    step: int | None
    roles: tuple[RoleSummary, ...] = ()
    scale: float | None = None
    loss: float | None = None
    largest: Mapping[str, Largest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Several checkpoints of one training.

    Attributes:
        points: In order.
        unit: What their steps count, for sentences.
    """

    points: Sequence[TrendPoint]
    unit: str = "step"

    @property
    def dated(self) -> list[TrendPoint]:
        """The points with a known step."""
        return [point for point in self.points if point.step is not None]
