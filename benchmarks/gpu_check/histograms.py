"""Histograms and the non-finite check on the device, bit for bit those of the CPU.

On a CPU the counting is the device's own all the same: `device_counts` works on any device.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ampdoctor.numerics.counting import count, device_counts
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.numerics.tensors import describe, extremes
from benchmarks.gpu_check.section import Section

SMALL, LARGE = (2, 900), (600, 900)
"""Shapes; the large one has more elements than the CPU's counting takes at once."""
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
_INTEGER = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def measure(device: torch.device, *, large: bool = True) -> Section:
    """Look at every tensor on the device and on the CPU; at large ones only where asked to."""
    rows, differences = {}, []
    for name, (dtype, patterns) in samples(large=large).items():
        try:
            rows[name] = digest(seen(tensor_of(patterns, dtype, device), on_device=True))
        except RuntimeError as error:  # a kernel that the device lacks: the other tensors are looked at all the same
            differences.append(f"{name}: {str(error).splitlines()[0]}")
        else:
            differences += differing(name, rows[name], on_the_host(dtype, patterns))
    return Section(rows=rows, differences=tuple(differences))


def samples(*, large: bool = True) -> dict[str, tuple[torch.dtype, np.ndarray]]:
    """Tensors by name, as bit patterns: the same on every machine and with every version of numpy."""
    found: dict[str, tuple[torch.dtype, np.ndarray]] = {}
    raw = np.random.PCG64(0).random_raw(math.prod(LARGE)).astype(np.uint64)
    shapes = (SMALL, LARGE) if large else (SMALL,)
    for name in DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue  # a format that this build of torch does not have
        size = dtype.itemsize
        patterns = (raw >> np.uint64(64 - 8 * size)).astype(f"uint{8 * size}").view(_INTEGER[size])
        for shape in shapes:
            found[f"{name}, {math.prod(shape)} random"] = dtype, patterns[: math.prod(shape)].reshape(shape)
        if size <= 2:
            every = np.arange(1 << 8 * size, dtype=np.uint32).astype(f"uint{8 * size}").view(_INTEGER[size])
            found[f"{name}, every pattern"] = dtype, every
        found[f"{name}, nothing"] = dtype, patterns[:0]
    values = raw[: math.prod(shapes[-1])].view(np.int64).astype(np.float64) / 2.0**63
    for name, dtype in (("float32", np.float32), ("float64", np.float64)):
        patterns = values.astype(dtype).view(_INTEGER[np.dtype(dtype).itemsize])
        found[f"{name}, {patterns.size} finite"] = getattr(torch, name), patterns
    return found


def tensor_of(patterns: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The patterns as a tensor on the device, a matrix transposed: integers travel, so that no NaN changes its bits."""
    tensor = torch.from_numpy(patterns.copy()).to(device).view(dtype)
    return tensor.t() if tensor.dim() == 2 else tensor


def seen(tensor: torch.Tensor, *, on_device: bool = False) -> dict[str, list[Any]]:
    """All that is asked of one tensor, in plain figures.

    Args:
        tensor: Where it is to be looked at.
        on_device: Count as on a device, whatever the tensor's own is.
    """
    flat, close = tensor.flatten(), describe(tensor)
    half = flat.numel() // 2
    return {
        "histogram": _figures(device_counts(tensor).fetch() if on_device else count(tensor)),
        "of two halves": _figures(count(flat[:half]) + count(flat[half:])),
        "extremes": [repr(float(value)) for value in extremes(tensor)],
        "flag": [all(math.isfinite(float(value)) for value in extremes(tensor))],
        "description": [close.nans, close.pos_infs, close.neg_infs, close.finite_min, close.finite_max],
    }


def _figures(histogram: Histogram) -> list[Any]:
    bins = histogram.counts.ravel()
    occupied = [[int(index), int(bins[index])] for index in bins.nonzero()[0]]
    special = [histogram.zeros, histogram.nans, histogram.pos_infs, histogram.neg_infs]
    return [occupied, *special, histogram.amin, histogram.amax]


def on_the_host(dtype: torch.dtype, patterns: np.ndarray) -> dict[str, str]:
    """What the CPU says of a tensor."""
    return digest(seen(tensor_of(patterns, dtype, torch.device("cpu"))))


def digest(answers: Mapping[str, Any]) -> dict[str, str]:
    """Each answer as 16 hexadecimal digits: two are equal if and only if every bit of what they stand for is."""
    return {name: hashlib.sha256(json.dumps(answer).encode()).hexdigest()[:16] for name, answer in answers.items()}


def differing(name: str, found: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each answer that is another one on the device."""
    for what, value in found.items():
        if ours[what] != value:
            yield f"{name}: {what} is {value} on the device, {ours[what]} on the CPU"
