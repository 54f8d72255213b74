"""Tensors of a bundle: how each lies in its safetensors file, and how it is made again.

What the format lacks is converted: complex numbers of 16 bytes and of 4 as pairs, a sparse tensor as its indices and
values. A view that repeats elements is stored once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ampdoctor.errors import CheckpointError

Entry = Mapping[str, Any]
"""What the manifest holds of a tensor; inert JSON."""

_PAIRS = {torch.complex128: torch.float64, torch.complex32: torch.float16}
_LARGEST_EXPANSION = 1 << 40
"""Bytes that a repeated view may stand for: a stride of 0 takes no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lying:
    """A tensor as it lies in a file.

    Attributes:
        entry: For the manifest.
        parts: The stored tensors by the name in the file: strided, detached, on whichever device.
    """

    entry: dict[str, Any]
    parts: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())


def lying(key: str, tensor: torch.Tensor, dtypes: Iterable[torch.dtype]) -> Lying | str:
    """Returns how a tensor lies in a file, or why it cannot: a predicate for a sentence.

    Args:
        key: Its name in the file.
        tensor: The tensor.
        dtypes: Those that the file holds.
    """
    entry = {
        "key": key,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "device": str(tensor.device),
        "requires_grad": bool(tensor.requires_grad and tensor.is_leaf),
        "form": "plain",
    }
    bare = tensor.detach()
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(tensor).__qualname__}, which is not written"
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return "has no values that are written"
    if bare.layout is torch.sparse_coo:
        whole = bare.coalesce()
        parts = {f"{key}/indices": whole.indices(), f"{key}/values": whole.values()}
        lacking = whole.values().dtype
        return (
            Lying(entry={**entry, "form": "sparse"}, parts=parts)
            if lacking in dtypes
            else f"is sparse, of {lacking}, which is not written"
        )
    if bare.layout is not torch.strided:
        return f"has the layout {bare.layout}, which is not written"
    bare = bare.resolve_conj().resolve_neg()
    if 0 in bare.stride() and bare.numel():
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in bare.stride())
        if math.prod(bare[once].shape) < bare.numel():
            entry["stored_shape"] = list(bare[once].shape)
            bare = bare[once]
    elif bare.numel() and not bare.is_contiguous() and _is_dense(bare):
        entry["stride"] = list(bare.stride())
    if bare.dtype in _PAIRS:
        entry["form"], bare = "pairs", torch.view_as_real(bare.contiguous())
    if bare.dtype not in dtypes:
        return f"has the dtype {bare.dtype}, which is not written"
    return Lying(entry=entry, parts={key: bare})


def made_again(entry: Entry, parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns the tensor of a manifest's entry, on the CPU.

    Args:
        entry: Nothing in it is trusted.
        parts: The tensors of the file, in memory of their own.
        name: The manifest's file, for errors.

    Raises:
        CheckpointError: The entry is malformed, or does not fit what is stored.
    """
    try:
        tensor = _made(entry, parts)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{name}: the entry of a tensor is malformed ({type(error).__name__}).") from None
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_(entry.get("requires_grad") is True)
    return tensor


def _made(entry: Entry, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    key, form, shape = entry["key"], entry["form"], _sizes(entry["shape"])
    dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
    if form == "sparse":
        indices, values = parts[f"{key}/indices"], parts[f"{key}/values"]
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()
    stored = parts[key]
    if form == "pairs":
        stored = torch.view_as_complex(stored)
    if stored.dtype is not dtype or form not in ("plain", "pairs"):
        raise ValueError(form)
    if "stored_shape" in entry:
        if list(stored.shape) != _sizes(entry["stored_shape"]) or math.prod(shape) > _LARGEST_EXPANSION:
            raise ValueError("stored_shape")
        return stored.expand(shape)
    if list(stored.shape) != shape:
        raise ValueError("shape")
    if "stride" in entry:
        again = torch.empty_strided(shape, _sizes(entry["stride"]), dtype=dtype)
        if not _is_dense(again):
            raise ValueError("stride")
        return again.copy_(stored)
    return stored


def _is_dense(tensor: torch.Tensor) -> bool:
    """Do its elements fill a memory of their own size, each once, in some order of the dimensions?"""
    reach = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if step != reach:
            return False
        reach *= size
    return True


def _sizes(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2**48 for one in value):
        raise ValueError("sizes")
    return value
