"""How a checkpoint's tensors changed since an earlier one: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ampdoctor.evidence.of_checkpoints.checkpoint import TensorRole


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
