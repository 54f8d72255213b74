"""Norms, samples and updates of many tensors, in a few kernels and without waiting for their device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampdoctor.hooks.torch_internals import no_modes
from ampdoctor.numerics.tensors import Unseen, dense_elements, flat, is_plain

_REDUCED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
"""Dtypes that torch reduces; others (float8) are widened first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """L2 norms of tensors on one device.

    Attributes:
        names: Of the tensors, in the vector's order.
        vector: float32 of shape (n,), on the device; float64 where one of the tensors is.
        off: By how much `torch._foreach_norm` and `torch.linalg.vector_norm` differ at most, relative: 0-dim, on the
            device; None where that was not asked.
    """

    names: tuple[str, ...]
    vector: Tensor
    off: Tensor | None = None


def local(tensor: Tensor) -> Tensor:
    """Returns what this process and device can tell of a tensor without communication and without waiting.

    Of a distributed tensor that is this process's shard. Of a sparse tensor on a device whose rows may occur twice, it
    is the rows as they are: to add them up would wait.

    Args:
        tensor: Floating-point or complex (real and imaginary parts are elements), of any layout, not meta.

    Returns:
        The stored elements, plain, strided and real, of any shape; a view wherever that is possible.
    """
    if is_plain(tensor) and tensor.layout is torch.strided and tensor.dtype in _REDUCED and not tensor.is_neg():
        return tensor
    with Unseen(tensor):
        to_local = getattr(tensor.detach(), "to_local", tensor.detach)
        own: Tensor = to_local()
    with Unseen(own):
        twice = own.layout is torch.sparse_coo and not own.is_coalesced() and own.device.type != "cpu"
        elements = dense_elements(own._values() if twice else own)
        return elements if elements.dtype in _REDUCED else elements.to(torch.float32)


def norms_of(named: Iterable[tuple[str, Tensor]], *, fused: bool = True, check: bool = False) -> list[Norms]:
    """Returns the norms of tensors, by device, without waiting for any device.

    Squares are summed in float32 (float64 for float64), so that a norm above 1.8e19 is inf and elements below 2.6e-23
    do not count, as in `clip_grad_norm_`; an fp16 tensor's norm does not overflow. A NaN makes its tensor's norm NaN. A
    shard's norm is that of the shard; that of an uncoalesced sparse tensor on a device takes repeated rows apart.

    Args:
        named: Name and tensor, as for `local`; empty tensors have norm 0.
        fused: By `torch._foreach_norm`, which is one kernel for many tensors; else one by one.
        check: Also compute them the other way (a torch of 2024 gave wrong norms of long lists, pytorch#140066).
    """
    groups: dict[torch.device, dict[torch.dtype, tuple[list[str], list[Tensor]]]] = {}
    for name, tensor in named:
        elements = local(tensor)
        names, tensors = groups.setdefault(elements.device, {}).setdefault(elements.dtype, ([], []))
        names.append(name)
        tensors.append(elements)
    found = []
    for by_dtype in groups.values():
        names = [name for part, _ in by_dtype.values() for name in part]
        lists = [tensors for _, tensors in by_dtype.values()]
        with Unseen(lists[0][0]):
            vector = _vector(lists, fused=fused)
            off = _apart(vector, _vector(lists, fused=not fused)) if check else None
        found.append(Norms(names=tuple(names), vector=vector, off=off))
    return found


def total(vector: Tensor) -> Tensor:
    """Returns the norm of all elements, 0-dim and on the device, from the norms of the tensors."""
    with Unseen(vector):
        norm: Tensor = torch.linalg.vector_norm(vector)
    return norm


def _vector(lists: Sequence[list[Tensor]], *, fused: bool) -> Tensor:
    """Returns the norms of lists of tensors, of one dtype each and of one device."""
    parts = []
    for tensors in lists:
        wide = None if tensors[0].dtype == torch.float64 else torch.float32
        if fused:
            norms = list(torch._foreach_norm(tensors, 2.0, dtype=wide))
        else:
            norms = [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in tensors]
        parts.append(torch.stack(norms))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Returns the largest relative difference; norms that are both not finite do not differ."""
    largest = torch.maximum(one.abs(), other.abs())
    apart = (one - other).abs() / largest.clamp(min=torch.finfo(one.dtype).tiny)
    same = one.isfinite().logical_not_() & other.isfinite().logical_not_()
    return torch.where(same | (one == other), torch.zeros_like(apart), apart).amax()


# A few thousand elements of each tensor, always the same ones, in one buffer on the tensors' device.


MOST = 4096
"""Elements of a tensor: a share is known within 1.5 percentage points at 95 % (1.96 * sqrt(1/4 / 4096))."""
MOST_TOGETHER = 1 << 22
"""Elements of all tensors of a step: 16 MiB in float32, which a bus carries in a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What stands in a buffer for a tensor.

    Attributes:
        name: Of the tensor.
        dtype: Of its elements; the buffer's is wider.
        elements: Number of its elements: of a shard, of this process's; of a sparse tensor, of the stored ones.
        count: Number of those in the buffer.
    """

    name: str
    dtype: torch.dtype
    elements: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of tensors that are on one device.

    Attributes:
        plan: The tensors, in the buffer's order.
        buffer: One-dimensional, float32, or float64 where one of the tensors is; on the device. A copy.
    """

    plan: tuple[Sampled, ...]
    buffer: Tensor


def sample(named: Sequence[tuple[str, Tensor]]) -> list[Samples]:
    """Returns samples of tensors, by device, without waiting for any device.

    Args:
        named: Name and tensor, as for `norms.local`. The same shapes and strides give the same elements each time.
    """
    most = min(MOST, max(MOST_TOGETHER // max(len(named), 1), 1))
    by_device: dict[torch.device, list[tuple[Sampled, Tensor]]] = {}
    for name, tensor in named:
        elements = local(tensor)
        with Unseen(elements):
            drawn = strided(elements, most)
        row = Sampled(name=name, dtype=elements.dtype, elements=elements.numel(), count=drawn.numel())
        by_device.setdefault(elements.device, []).append((row, drawn))
    return [_joined(rows) for rows in by_device.values()]


def strided(elements: Tensor, most: int) -> Tensor:
    """Returns at most `most` elements, evenly over memory, as a view if the tensor is dense; one-dimensional.

    Args:
        elements: Plain and strided.
        most: At least 1.
    """
    line = flat(elements)
    stride = stride_of(line.numel(), most)
    if stride == 1:
        return line
    return line.as_strided((-(-line.numel() // stride),), (line.stride(0) * stride,), line.storage_offset())


def stride_of(elements: int, most: int) -> int:
    """Returns the least stride that leaves at most `most` of so many elements and has no factor with their number.

    A stride that divides the length of a row would look at a few columns of the matrix alone.
    """
    stride = max(-(-elements // most), 1)
    while math.gcd(stride, elements) > 1:
        stride += 1
    return stride


def cut(plan: Iterable[Sampled], buffer: Tensor) -> list[Tensor]:
    """Returns each tensor's part of a buffer, as views."""
    return list(buffer.split([row.count for row in plan]))


def _joined(rows: Sequence[tuple[Sampled, Tensor]]) -> Samples:
    wide = torch.float64 if any(row.dtype == torch.float64 for row, _ in rows) else torch.float32
    with Unseen(rows[0][1]):
        buffer = torch.cat([drawn.to(wide) for _, drawn in rows])
    return Samples(plan=tuple(row for row, _ in rows), buffer=buffer)


# How far an optimizer's step moves each parameter, from the same few elements before and after it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One parameter in one step.

    Attributes:
        ratio: L2 norm of the update over that of the parameter before, of the sampled elements; None where the
            parameter is zero there, or one of the two is not finite.
        unmoved: Share of the sampled elements that the step left as they were; None where the optimizer draws random
            numbers: stochastic rounding leaves most weights as they were, and loses nothing.
    """

    ratio: float | None
    unmoved: float | None


class Updates:
    """Samples parameters when a step is about to be taken; no more of them is ever copied.

    An optimizer's step is seen whole: decay and update in one, foreach or fused, in place or by a new tensor in
    `parameter.data`. Of a step that is skipped, on the host or on the device, nothing moves.

    Args:
        named: Name and parameter.

    Attributes:
        before: By device, before the step.
        random: Random numbers were drawn between `before` and `changes`.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self.before: list[Samples] = sample(named)
        self.random = False
        self._generators = _states(self.before)

    def changes(self) -> list[Tensor]:
        """Returns what the step has added to the elements of each of `before`, on the device.

        A parameter whose shape or dtype the step has changed makes its device's update NaN.
        """
        found = []
        self.random = _states(self.before) != self._generators
        for before, after in zip(self.before, sample(self._named), strict=True):
            with Unseen(before.buffer):
                same = before.plan == after.plan
                found.append(after.buffer - before.buffer if same else torch.full_like(before.buffer, math.nan))
        return found


def _states(samples: Sequence[Samples]) -> list[bytes]:
    """The states of the generators of the samples' devices, and of the CPU's; on the host, nothing waits."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        devices = sorted({one.buffer.device.index or 0 for one in samples if one.buffer.device.type == "cuda"})
        generators += [torch.cuda.default_generators[index] for index in devices]
    with no_modes():
        return [generator.get_state().numpy().tobytes() for generator in generators]


def moved(before: Tensor, change: Tensor, *, random: bool = False) -> Moved:
    """Returns the figures of one parameter.

    Args:
        before: Its sampled elements before the step, on the CPU.
        change: What the step has added to each.
        random: The optimizer draws random numbers.
    """
    weight, update = (float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in (before, change))
    known = weight > 0.0 and math.isfinite(weight) and math.isfinite(update)
    still = int((change == 0.0).sum()) / max(change.numel(), 1)
    return Moved(ratio=update / weight if known else None, unmoved=None if random else still)
