"""Exact looks at one tensor: is it finite, what does it hold?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ampdoctor.evidence.of_runs.trace import TensorStats
from ampdoctor.evidence.where import NonFinite
from ampdoctor.numerics import describe, extremes, nonfinite_flag
from ampdoctor.probes.ops.tensors import is_watched


def is_nonfinite(tensor: torch.Tensor) -> bool:
    """Say exactly whether a tensor holds a NaN or an infinity: one reduction."""
    return is_watched(tensor) and not math.isfinite(float(nonfinite_flag(tensor)))


def dtype_name(tensor: torch.Tensor) -> str:
    """Its dtype as evidence spells it ("float16")."""
    return str(tensor.dtype).removeprefix("torch.")


def stats_of(tensor: torch.Tensor) -> TensorStats:
    """Numbers of one tensor, exactly."""
    values = dense(tensor).detach()
    if not is_watched(values) or values.numel() == 0:
        return TensorStats(dtype=dtype_name(tensor), shape=tuple(tensor.shape), amax=0.0, nans=0, infs=0, zeros=0)
    if values.is_complex():
        return _stats_of_complex(values, tuple(tensor.shape))
    seen = describe(values)
    return TensorStats(
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        amax=seen.finite_amax or 0.0,
        nans=seen.nans,
        infs=seen.pos_infs + seen.neg_infs,
        zeros=values.numel() - int(torch.count_nonzero(values)),
    )


def _stats_of_complex(values: torch.Tensor, shape: tuple[int, ...]) -> TensorStats:
    wide = values.to(torch.complex128)
    fine = wide[torch.isfinite(wide)]
    return TensorStats(
        dtype=dtype_name(values),
        shape=shape,
        amax=float(fine.abs().max()) if fine.numel() else 0.0,
        nans=int(torch.isnan(wide).sum()),
        infs=int(torch.isinf(wide).sum()),
        zeros=int((wide == 0).sum()),
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in a layout and a dtype that every op takes: those of a sparse tensor, 8-bit floats in float32."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def kind_of(tensors: Sequence[torch.Tensor]) -> NonFinite:
    """NaN where there is one, else an infinity."""
    ends = [float(end) for t in tensors if is_watched(t) for end in extremes(t)]  # a NaN makes both NaN
    if any(map(math.isnan, ends)):
        return "nan"
    return "inf" if any(map(math.isinf, ends)) else "none"
