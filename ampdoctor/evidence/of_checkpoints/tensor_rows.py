"""The examined tensors of a checkpoint in the form of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from ampdoctor.evidence.codec import Count, Fraction
from ampdoctor.evidence.of_checkpoints.checkpoint import CastLoss, TensorRole, TensorSummary


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
    at_max: Count
    amax: float | None
    amin: float | None
    fp16: CastShares | None
    bf16: CastShares | None


class TensorRows(Sequence[TensorRow]):
    """Rows of numbers, one for each tensor, in the order of the checkpoint.

    A row is made when it is read. For a checkpoint with 100,000 tensors, the rows would take five times the memory of
    the numbers behind them, and most reports are rendered without them.

    Args:
        tensors: The numbers.
        folder: The checkpoint's folder among those of a training; it precedes the names of the files.
    """

    __slots__ = ("_folder", "_tensors")

    def __init__(self, tensors: tuple[TensorSummary, ...], folder: str = "") -> None:
        self._tensors = tensors
        self._folder = folder

    def inside(self, folder: str) -> TensorRows:
        """Returns the same rows, with files relative to the folder above."""
        return TensorRows(self._tensors, folder)

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, index: int) -> TensorRow: ...
    @overload
    def __getitem__(self, index: slice) -> TensorRows: ...
    def __getitem__(self, index: int | slice) -> TensorRow | TensorRows:
        if isinstance(index, slice):
            return TensorRows(self._tensors[index], self._folder)
        return _row(self._tensors[index], self._folder)

    def __eq__(self, other: object) -> bool:
        """Rows are equal to a sequence of equal rows, such as those of a report that was read back."""
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list


def _row(tensor: TensorSummary, folder: str) -> TensorRow:
    return TensorRow(
        name=tensor.name,
        role=tensor.role,
        entry=tensor.entry,
        module=tensor.module,
        group=tensor.group,
        file=f"{folder}/{tensor.file}" if folder and tensor.file else tensor.file,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        examined=tensor.examined,
        counted=tensor.counted,
        zeros=tensor.zeros,
        nan=tensor.nans,
        inf=tensor.infs,
        at_max=tensor.at_max,
        amax=tensor.amax,
        amin=tensor.amin,
        fp16=_lost(tensor.cast("fp16")),
        bf16=_lost(tensor.cast("bf16")),
    )


def _lost(cast: CastLoss | None) -> CastShares | None:
    if cast is None:
        return None
    return CastShares(flushed=cast.flushed, subnormal=cast.subnormal, overflowed=cast.overflowed)
