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
    """L2 norms of tensors on one device."""

    names: tuple[str, ...]  # in the vector's order
    vector: Tensor  # float32 of shape (n,), on the device; float64 where one of the tensors is


def local(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements on this process, plain, strided and real, without communication or waiting."""
    if is_plain(tensor) and tensor.layout is torch.strided and tensor.dtype in _REDUCED and not tensor.is_neg():
        return tensor
    with Unseen(tensor):
        to_local = getattr(tensor.detach(), "to_local", tensor.detach)
        own: Tensor = to_local()
    with Unseen(own):
        twice = own.layout is torch.sparse_coo and not own.is_coalesced() and own.device.type != "cpu"
        elements = dense_elements(own._values() if twice else own)
        return elements if elements.dtype in _REDUCED else elements.to(torch.float32)


def norms_of(named: Iterable[tuple[str, Tensor]]) -> list[Norms]:
    """Returns L2 norms by device, as `clip_grad_norm_` sums them (in float32 at least), without waiting."""
    groups: dict[torch.device, dict[torch.dtype, tuple[list[str], list[Tensor]]]] = {}
    for name, tensor in named:
        elements = local(tensor)
        names, tensors = groups.setdefault(elements.device, {}).setdefault(elements.dtype, ([], []))
        names.append(name)
        tensors.append(elements)
    found = []
    for by_dtype in groups.values():
        names = [name for part, _ in by_dtype.values() for name in part]
        with Unseen(next(iter(by_dtype.values()))[1][0]):
            vectors = [
                torch.stack(torch._foreach_norm(tensors, 2.0, dtype=None if dtype == torch.float64 else torch.float32))
                for dtype, (_, tensors) in by_dtype.items()
            ]
            found.append(Norms(names=tuple(names), vector=vectors[0] if len(vectors) == 1 else torch.cat(vectors)))
    return found


def total(vector: Tensor) -> Tensor:
    """Returns the norm of all elements, 0-dim and on the device, from the tensors' norms."""
    with Unseen(vector):
        norm: Tensor = torch.linalg.vector_norm(vector)
    return norm


# -- samples: a few thousand elements of each tensor, always the same ones, in one buffer a device --

MOST = 4096
"""Elements of a tensor: a share is known within 1.5 percentage points at 95 % (1.96 * sqrt(1/4 / 4096))."""
MOST_TOGETHER = 1 << 22
"""Elements of all tensors of a step: 16 MiB in float32, which a bus transfers in a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The sample of one tensor in a buffer."""

    name: str  # of the tensor
    dtype: torch.dtype  # of its elements; the buffer's is wider
    elements: int  # of the tensor on this process; of a sparse one, the stored elements
    count: int  # of the elements in the buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of tensors that are on one device."""

    plan: tuple[Sampled, ...]  # the tensors, in the buffer's order
    buffer: Tensor  # a copy, one-dimensional, float32, or float64 where a tensor is; on the device


def sample(named: Sequence[tuple[str, Tensor]]) -> list[Samples]:
    """Returns samples, by device, without waiting; equal shapes and strides give the same elements each time."""
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
    """Returns at most `most` (>= 1) elements of a plain strided tensor, evenly over memory; a view if it is dense."""
    line = flat(elements)
    stride = stride_of(line.numel(), most)
    if stride == 1:
        return line
    return line.as_strided((-(-line.numel() // stride),), (line.stride(0) * stride,), line.storage_offset())


def stride_of(elements: int, most: int) -> int:
    """Returns the least stride that leaves at most `most` elements and is coprime to their number (to meet columns)."""
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


# -- updates: how far a step moves each parameter, from the same few elements before and after --


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One parameter in one step, by its sampled elements."""

    ratio: float | None  # norm of the update over that before; None where that is 0, or one of them is not finite
    unmoved: float | None  # share that stayed; None where random numbers were drawn: stochastic rounding loses nothing


class Updates:
    """Samples parameters before a step, of any kind; only these samples are ever copied."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self.before: list[Samples] = sample(named)  # by device
        self.random = False  # random numbers were drawn between `before` and `changes`
        self._generators = _states(self.before)

    def changes(self) -> list[Tensor]:
        """Returns what the step has added to each of `before`, on the device; NaN where a shape or dtype changed."""
        found = []
        self.random = _states(self.before) != self._generators
        for before, after in zip(self.before, sample(self._named), strict=True):
            with Unseen(before.buffer):
                same = before.plan == after.plan
                found.append(after.buffer - before.buffer if same else torch.full_like(before.buffer, math.nan))
        return found


def _states(samples: Sequence[Samples]) -> list[bytes]:
    """Returns the generator states of the samples' devices and of the CPU; they are on the host, so nothing waits."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        devices = sorted({one.buffer.device.index or 0 for one in samples if one.buffer.device.type == "cuda"})
        generators += [torch.cuda.default_generators[index] for index in devices]
    with no_modes():
        return [generator.get_state().numpy().tobytes() for generator in generators]


def moved(before: Tensor, change: Tensor, *, random: bool = False) -> Moved:
    """Returns a parameter's figures from its samples and their changes, on the CPU; `random` as in `Updates`."""
    weight, update = (float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in (before, change))
    known = weight > 0.0 and math.isfinite(weight) and math.isfinite(update)
    still = int((change == 0.0).sum()) / max(change.numel(), 1)
    return Moved(ratio=update / weight if known else None, unmoved=None if random else still)
