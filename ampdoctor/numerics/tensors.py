"""The stored elements of any tensor as a plain strided tensor, finiteness checks, and distances of tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    TensorBase,
    _disabled_torch_dispatch_impl,
    _ExcludeDispatchKeyGuard,
)
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

# -- tensor ops hidden from traces, autocast and autograd --


def _keys(*names: str) -> DispatchKeySet:
    keys = DispatchKeySet(getattr(DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | DispatchKeySet(getattr(DispatchKey, name))
    return keys


_BELOW_AUTOGRAD = _keys(
    "AutocastCPU", "AutocastCUDA", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"
)
_BELOW_MODES = _BELOW_AUTOGRAD | _keys("Python", "PythonTLSSnapshot")


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor's ops run in ATen, False for a wrapper with its own (FakeTensor, DTensor, nested)."""
    return type(tensor).__torch_dispatch__ is _disabled_torch_dispatch_impl


class Unseen:
    """Ops inside are hidden from function and dispatch modes, autocast and autograd.

    Masked dispatch keys cost 1 microsecond, `no_grad` with `_disable_current_modes` 8; a wrapper needs the latter.
    """

    __slots__ = ("_functions", "_keys", "_modes", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> None:
        plain = is_plain(self._tensor)
        self._functions = DisableTorchFunction()
        self._functions.__enter__()
        self._keys = _ExcludeDispatchKeyGuard(_BELOW_MODES if plain else _BELOW_AUTOGRAD)
        self._keys.__enter__()
        self._modes: ExitStack | None = None
        if not plain:
            self._modes = ExitStack()
            self._modes.enter_context(_disable_current_modes())
            own_mode = getattr(self._tensor, "fake_mode", None)
            if own_mode is not None:  # new tensors must be fake as well
                self._modes.enter_context(own_mode)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._modes is not None:
            self._modes.close()
        self._keys.__exit__(kind, error, trace)
        self._functions.__exit__(kind, error, trace)


_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
SPARSE_LAYOUTS = _COMPRESSED | {torch.sparse_coo}  # layouts that store fewer elements than `numel()`
Dtypes = tuple[torch.dtype, ...]
E8M0: Dtypes = tuple(getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name))  # from 2.7 on
E2M1_PAIRS: Dtypes = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))
"""The dtype of two FP4 numbers in a byte, which torch has from 2.8 on and whose elements cannot be read; else none."""


def dense_elements(tensor: Tensor) -> Tensor:
    """Return the stored elements as one plain strided real tensor, if possible without a copy.

    - complex: the real and imaginary parts are separate elements;
    - sparse COO: the values, duplicates added up; compressed sparse: the values; unstored elements are left out;
    - nested: the values of all constituents;
    - quantised: the numbers that the integers represent, in float32;
    - a distributed tensor: this process's shard, without communication;
    - a tensor subclass with ops of its own (torchao's): what it dequantises to, else the tensors that it consists of.

    A meta tensor has no values and must not be passed.
    """
    stored = _stored(tensor)
    if stored is not tensor:
        return dense_elements(stored)
    return tensor.resolve_neg()


def _stored(tensor: Tensor) -> Tensor:
    """Take one step from a tensor to the tensor that holds its elements; itself if there is no further step."""
    result = tensor
    local = getattr(tensor, "to_local", None)
    if local is not None:
        result = local()
    elif tensor.is_nested or tensor.layout in _COMPRESSED:
        result = tensor.values()
    elif tensor.layout is torch.sparse_coo:
        result = tensor.coalesce().values()
    elif tensor.is_mkldnn:
        result = tensor.to_dense()
    elif tensor.is_quantized:
        result = tensor.dequantize()
    elif not is_plain(tensor) and not hasattr(tensor, "fake_mode"):
        result = _meant_by(tensor)
    elif tensor.is_complex():
        result = torch.view_as_real(tensor.resolve_conj())
    return result


_WIDE = ("dequantize", "to_original_precision", "to_dense")  # a subclass's numbers; torchao's has one of the first two


def _meant_by(tensor: Tensor) -> Tensor:
    """The numbers of a subclass with ops of its own, or of its parts; TypeError where it gives neither."""
    for name in _WIDE:
        try:
            wide = getattr(tensor.detach(), name)()
        except Exception:  # noqa: BLE001, S112 - a subclass may raise anything for an unknown op
            continue
        if isinstance(wide, Tensor) and type(wide) is not type(tensor):
            return wide
    parts = [dense_elements(part).reshape(-1) for part in parts_of(tensor) if part.is_floating_point()]
    if parts:
        return torch.cat([part.to(torch.float64) for part in parts])
    raise TypeError(f"a {type(tensor).__name__} gives no numbers")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a subclass consists of; [tensor] for a plain one, [] for one that hides them."""
    if is_plain(tensor):
        return [tensor]
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read: a subclass with ops of its own may hide them."""
    if is_plain(tensor) or tensor.is_meta or hasattr(tensor, "fake_mode"):
        return True
    try:
        dense_elements(tensor)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of a strided tensor with its dimensions in the order of memory: contiguous if it is dense."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)), reverse=True)
    return tensor.permute(order)


def flat(tensor: Tensor) -> Tensor:
    """Return a strided tensor's elements in one dimension, in memory order if that avoids a copy."""
    return in_memory_order(tensor).reshape(-1)


# -- non-finite values: a flag for the cost of one reduction, exact counts, and statistics --

_NATIVE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_device_of = TensorBase.device.__get__  # a replay's own `Tensor.device` looks who asks, and takes ten times as long
_SMALL = 1 << 16  # elements up to which copying tensors into one takes less time than a reduction of each


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element as 0-dim tensors on the tensor's device.

    An element is non-finite if and only if one of the two is, and a NaN makes both NaN. Their dtype is the tensor's own
    if that has reductions, else one that holds its elements; both are 0 if no element could be non-finite.
    """
    with Unseen(tensor):
        return _extremes_of(tensor) if is_plain(tensor) and _is_simple(tensor) else _extremes_of_any(tensor)


def extremes_of_each(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the `extremes` of each tensor, in order; hiding many small tensors at once halves the time."""
    each = [(tensor, is_plain(tensor)) for tensor in tensors]
    plain = [tensor for tensor, is_one in each if is_one]
    with Unseen(plain[0]) if plain else nullcontext():
        found = iter([_extremes_of(tensor) if _is_simple(tensor) else _extremes_of_any(tensor) for tensor in plain])
    return [next(found) if is_one else extremes(tensor) for tensor, is_one in each]


def extremes_of_all(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return `extremes` that are finite if and only if all tensors are; small tensors of a kind share a pair."""
    small: defaultdict[Any, list[Tensor]] = defaultdict(list)
    others: list[Tensor] = []
    for tensor in tensors:
        joins = is_plain(tensor) and _is_simple(tensor) and tensor.numel() <= _SMALL
        (small[tensor.dtype, _device_of(tensor)] if joins else others).append(tensor)
    for members in small.values():
        with Unseen(members[0]):
            others.append(torch._utils._flatten_dense_tensors(members))  # noqa: SLF001 - public as `all_reduce_coalesced`
    return extremes_of_each(others)


def to_host(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """Return pairs of `extremes` as floats, with one sync for each dtype and device."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for index, (low, _) in enumerate(pairs):
        groups[low.dtype, _device_of(low)].append(index)
    values = [(0.0, 0.0)] * len(pairs)
    for indices in groups.values():
        with Unseen(pairs[indices[0]][0]):
            read = torch.stack([end for index in indices for end in pairs[index]]).tolist()
        for index, pair in zip(indices, zip(read[::2], read[1::2], strict=True), strict=True):
            values[index] = pair
    return values


def _is_simple(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg() or tensor.is_meta:
        return False
    return tensor.dtype in _NATIVE and tensor.numel() > 0


def _extremes_of(part: Tensor) -> tuple[Tensor, Tensor]:
    # A reduction over a transposed tensor was 10 times slower than over the same elements in memory order.
    low, high = torch.aminmax(in_memory_order(part))
    return low, high


def _extremes_of_any(tensor: Tensor) -> tuple[Tensor, Tensor]:
    part = tensor if tensor.is_meta else dense_elements(tensor)
    if part.is_meta or not part.is_floating_point() or part.dtype in E2M1_PAIRS or part.numel() == 0:
        none = torch.zeros((), dtype=torch.float32, device="cpu" if part.is_meta else part.device)
        return none, none
    return _extremes_of(_native(part))


def _native(part: Tensor) -> Tensor:
    """Cast float8, which has no reductions, to bfloat16: that holds each value, at half the scratch of float32."""
    return part.to(torch.bfloat16) if part.is_floating_point() and part.dtype not in _NATIVE else part


def nonfinite_counts(tensor: Tensor) -> tuple[int, int, int]:
    """Return the exact numbers of NaN, +Inf and -Inf elements; waits for the device."""
    stats = describe(tensor)
    return stats.nans, stats.pos_infs, stats.neg_infs


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """A tensor's statistics as plain values."""

    shape: tuple[int, ...]  # of a nested tensor with ragged dimensions, that of its values
    dtype: str  # without "torch."
    nans: int = 0
    pos_infs: int = 0
    neg_infs: int = 0
    finite_min: float | None = None  # -0.0 and 0.0 are not distinguished
    finite_max: float | None = None

    @property
    def finite_amax(self) -> float | None:
        """Largest finite magnitude, None if nothing is finite."""
        if self.finite_min is None or self.finite_max is None:
            return None
        return max(abs(self.finite_min), abs(self.finite_max))

    @property
    def nonfinite(self) -> int:
        """Number of elements that are NaN or infinite."""
        return self.nans + self.pos_infs + self.neg_infs


def describe(tensor: Tensor) -> TensorStats:
    """Return the statistics of a tensor; waits for the device. Only in a non-finite one elements are counted."""
    with Unseen(tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta:
            return TensorStats(shape=tuple(tensor.shape), dtype=dtype)
        part = dense_elements(tensor)
        shape = tuple(part.shape) if tensor.is_nested else tuple(tensor.shape)
        if part.dtype in E2M1_PAIRS or part.numel() == 0:
            return TensorStats(shape=shape, dtype=dtype)
        values = in_memory_order(_native(part))
        low, high = (float(v) for v in torch.aminmax(values))
        if math.isfinite(low) and math.isfinite(high):
            return TensorStats(shape=shape, dtype=dtype, finite_min=low, finite_max=high)
        return _counted(values, shape, dtype)


def _counted(values: Tensor, shape: tuple[int, ...], dtype: str) -> TensorStats:
    finite = values[values.isfinite()]
    above, below = (int(torch.count_nonzero(values == end)) for end in (math.inf, -math.inf))
    low, high = (float(end) for end in torch.aminmax(finite)) if finite.numel() else (None, None)
    return TensorStats(
        shape=shape,
        dtype=dtype,
        nans=values.numel() - finite.numel() - above - below,
        pos_infs=above,
        neg_infs=below,
        finite_min=low,
        finite_max=high,
    )


# -- how far a tensor is from a reference: sums of squares and counts, block by block --

BLOCK = 1 << 16  # elements at a time: with intermediate results they stay in the cache
EXACT_ENOUGH = (2.0**-90, 2.0**120)
"""Bounds between which a sum of a block's fp32 squares has no relevant error.

No square overflowed, and those below 2^-126, which may count as 0, are together at most 2^-110, a millionth of it.
"""


@dataclass(slots=True)
class Distance:
    """Sums over pairs of elements; an element is flushed if it is zero in `got` and nonzero in the reference."""

    least: float = 0.0  # bound for `below`
    error: float = 0.0  # of the squares of got - reference
    norm: float = 0.0  # of the squares of got
    reference: float = 0.0  # of the squares of the reference
    flushed_error: float = 0.0  # of the squares of the reference at flushed elements
    flushed: int = 0
    below: int = 0  # flushed elements whose reference is smaller than `least`
    nonzero: int = 0  # nonzero elements of the reference

    @property
    def relative(self) -> float:
        """L2 norm of the difference over the reference's; inf where one is not finite, or only the reference is 0."""
        if self.reference == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        ratio = math.sqrt(self.error / self.reference) if self.error >= 0.0 else math.inf
        return ratio if math.isfinite(ratio) else math.inf

    def add(self, got: Tensor | None, reference: Tensor, *, scale: float = 1.0) -> None:
        """Add the elements of two dense tensors of one shape; None is a tensor of zeros. `got` is divided by `scale`.

        `got` has any floating dtype; `reference` is float32 or float64, and is the dtype of the division and the sums.
        """
        beside = reference.new_zeros(()).expand_as(reference) if got is None else got
        for one, other in zip(blocks(beside), blocks(reference), strict=True):
            self._add(one, other, scale)

    def _add(self, got: Tensor, reference: Tensor, scale: float) -> None:
        present = int(torch.count_nonzero(reference))
        zero = got == 0
        if present and int(torch.count_nonzero(zero)):
            bits = torch.int32 if reference.dtype.itemsize == 4 else torch.int64
            lost = (reference.view(bits) & -zero.to(bits)).view(reference.dtype)  # a mask of bits: filling takes longer
            flushed = int(torch.count_nonzero(lost))
            self.flushed += flushed
            self.flushed_error += squares(lost) if flushed else 0.0
            if flushed and self.least:
                self.below += int(torch.count_nonzero(lost.abs() < self.least)) - (lost.numel() - flushed)
        self.nonzero += present
        if scale != 1.0:
            got = got.to(reference.dtype) / scale
        self.error += squares(got - reference)
        self.norm += squares(got)
        self.reference += squares(reference)


def together(distances: Iterable[Distance]) -> Distance:
    """The distance of all tensors from all references."""
    total = Distance()
    for one in distances:
        for name in ("error", "norm", "reference", "flushed_error", "flushed", "below", "nonzero"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's elements, `BLOCK` at a time; larger blocks on a device, where each read of a number waits."""
    flat = tensor.detach().reshape(-1)
    return iter(flat.split(BLOCK if tensor.device.type == "cpu" else BLOCK << 10))


def squares(values: Tensor) -> float:
    """The sum of the squares of a block's elements; not finite where one is not."""
    if values.dtype is torch.float32:
        total = float(torch.dot(values, values))
        if EXACT_ENOUGH[0] <= total <= EXACT_ENOUGH[1]:
            return total
    return float(values.double().square().sum())
