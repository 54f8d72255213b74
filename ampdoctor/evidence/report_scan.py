"""The sections of `scan`'s report, and its rows of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from ampdoctor.evidence.checkpoint_stats import TensorRole
from ampdoctor.evidence.json_records import Count, Fraction, Shape

TrendUnit = Literal["step", "epoch", "save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFigures:
    """What one role comes to.

    Attributes:
        amax: Largest finite magnitude.
        fp16_flushed: Share of the nonzero elements that a cast to fp16 makes zero.
    """

    amax: float | None
    fp16_flushed: Fraction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendFigures:
    """One checkpoint that was read.

    Attributes:
        name: Relative to the folder.
        step: When it was saved, in unit; None where that is not known.
        scale: Loss scale; None without a scaler.
        loss: The last loss of the log up to then; None without one.
        roles: Totals by role.
    """

    name: str
    step: int | None
    scale: float | None = None
    loss: float | None = None
    roles: Mapping[TensorRole, RoleFigures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendSection:
    """Figures of the checkpoints of a folder that were read, in order.

    Attributes:
        unit: What the points' steps count.
        points: One for each checkpoint that was read.
        summary: What the search came to, in a sentence.
        first_sick: The one that the report is about, where it is sick: the first with more than what is set
            aside.
        last_healthy: The last one before it whose state is not sick, of those that were read, and before the loss
            scale has collapsed, unless it has recovered; where that alone is wrong, the last before that.
        monotone: Whether no healthy one was read after a sick one.
    """

    unit: TrendUnit
    points: tuple[TrendFigures, ...]
    summary: str
    first_sick: str | None
    last_healthy: str | None
    monotone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCheckpoint:
    """One side of a comparison.

    Attributes:
        path: Its name.
        global_step: The step counter stored in it; None where there is none.
        scale: Its loss scale; None without a scaler.
    """

    path: str
    global_step: int | None
    scale: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """What became of the tensors of one role.

    Attributes:
        tensors: How many there are.
        elements: Of all of them.
        unchanged: A fraction of all elements.
        relative_change: L2 norm of the change over that of the old values; 0 where nothing changed, None where
            there was only zero before.
        amax: Largest finite magnitude in the newer one.
        old_amax: The same in the older one.
    """

    tensors: Count
    elements: Count
    unchanged: Fraction | None
    relative_change: float | None
    amax: float | None
    old_amax: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGrowth:
    """A tensor whose largest magnitude grew.

    Attributes:
        tensor: Its name, behind that of its group.
        old_amax: Largest finite magnitude in the older one.
        amax: The same in the newer one.
        log2_growth: log2 of the second over the first.
        intervals: How many more of these intervals until 65504.
        meets_at: The step at which that is; None where the steps are not known.
    """

    tensor: str
    old_amax: float
    amax: float
    log2_growth: float
    intervals: float
    meets_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTensor:
    """A tensor that both have.

    Attributes:
        name: Its name, behind that of its group.
        role: What it is for.
        entry: Last part of its address, such as weight or exp_avg_sq.
        dtype: In the newer one.
        old_dtype: In the older one.
        shape: Size of each dimension.
        unchanged: A fraction of all elements.
        relative_change: As in roles.
        amax: Largest finite magnitude in the newer one.
        old_amax: The same in the older one.
        nonfinite: NaN and infinite elements in the newer one.
        old_nonfinite: The same in the older one.
    """

    name: str
    role: TensorRole
    entry: str
    dtype: str
    old_dtype: str
    shape: tuple[Count, ...]
    unchanged: Fraction | None
    relative_change: float | None
    amax: float | None
    old_amax: float | None
    nonfinite: Count
    old_nonfinite: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSection:
    """What became of the tensors since the older checkpoint.

    Attributes:
        old: The older checkpoint.
        new: The newer checkpoint.
        steps: Steps between the two; None where that is not known.
        roles: Totals by role, of the tensors that both have.
        growth: Tensors whose largest magnitude grew, by when they would meet fp16's 65504 at that rate;
            intervals are as long as the time between the two.
        tensors: What both have, in the same shape.
        appeared: Tensors that only the newer one has.
        vanished: Tensors that only the older one has.
        reshaped: Tensors whose shape is another: the old and the new sizes.
    """

    old: ChangedCheckpoint
    new: ChangedCheckpoint
    steps: int | None
    roles: Mapping[TensorRole, RoleChange]
    growth: tuple[TensorGrowth, ...]
    tensors: tuple[ChangedTensor, ...]
    appeared: tuple[str, ...]
    vanished: tuple[str, ...]
    reshaped: Mapping[str, tuple[tuple[Count, ...], tuple[Count, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """One tensor of a checkpoint.

    Attributes:
        role: What it is for.
        name: As in named_parameters() or named_buffers(); for a moment the name of its parameter, or param N
            where that is not certain.
        group: Which of several models in the file, or which optimizer; empty for the main one.
        entry: Last part of its address, such as weight or exp_avg_sq.
        dtype: The stored format.
        shape: Size of each dimension.
        bytes: Of its elements.
        file: The file that it lies in.
    """

    role: TensorRole
    name: str
    group: str
    entry: str
    dtype: str
    shape: tuple[Count, ...]
    bytes: Count
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRole:
    """All tensors of one role.

    Attributes:
        tensors: How many there are.
        elements, bytes: Of all of them.
        dtypes: How many tensors of each format.
    """

    tensors: Count
    elements: Count
    bytes: Count
    dtypes: Mapping[str, Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGroup:
    """One parameter group of an optimizer.

    Attributes:
        parameters: How many parameters the group has; None where it does not say.
        settings: Learning rate, betas and the like, as stored.
    """

    parameters: int | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedOptimizer:
    """One optimizer's state.

    Attributes:
        path: Where it lies in the file.
        parameters: How many parameters have a state.
        groups: Its param_groups.
    """

    path: str
    parameters: Count
    groups: tuple[ListedGroup, ...]


class ListedScaler(TypedDict):
    """A loss scaler's state; its numbers stand beside these keys.

    Attributes:
        key: Where it lies in the file; empty for the file itself.
        file: The file that it lies in.
    """

    key: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLog:
    """A training's log.

    Attributes:
        entries: How many there are.
        first_step: The smallest step in it.
        last_step: The largest.
    """

    entries: Count
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMember:
    """One checkpoint of a folder.

    Attributes:
        name: Relative to the folder; (final model) for the files that lie there beside the checkpoints.
        step: Number in its name, or the step stored inside; None where neither tells.
        unit: What step counts; number where that is not known.
        placed: Whether anything tells when it was saved; those that do not come last.
        files: Names of the files that are the checkpoint; empty for a whole file or folder.
    """

    name: str
    step: int | None
    unit: Literal["step", "epoch", "number"]
    placed: bool
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureSection:
    """What lies in a checkpoint, or which checkpoints lie in a folder.

    Attributes:
        tensors: Every tensor, none of them read.
        roles: Totals by role.
        optimizers: Every optimizer's state.
        scalers: Every loss scaler's state: where it lies, and its numbers.
        unsafe_globals: Names that only an unsafe load would resolve, and that were not resolved.
        log: The training's log; None without one.
        members: Of a folder of many checkpoints each, in the order of time.
    """

    tensors: tuple[ListedTensor, ...] = ()
    roles: Mapping[TensorRole, ListedRole] = field(default_factory=dict)
    optimizers: tuple[ListedOptimizer, ...] = ()
    scalers: tuple[Annotated[Mapping[str, Any], Shape(ListedScaler)], ...] = ()
    unsafe_globals: tuple[str, ...] = ()
    log: ListedLog | None = None
    members: tuple[ListedMember, ...] = ()
