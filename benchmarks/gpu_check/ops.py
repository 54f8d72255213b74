"""The output dtype of each op under CUDA's autocast, beside the emulation on the CPU.

On a GPU the ops run. Without one, CUDA's own cast kernels are asked all the same: they are in every build of torch, and
run over fake CUDA tensors, which have a dtype and no data. What such tensors cannot reach is skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ampdoctor.precision import kernels
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.kernels import overload, registered
from benchmarks.gpu_check.section import Section
from fixtures.op_samples import ALL

COMBINATIONS = (
    ("float32", "float32", "float16"),
    ("float16", "float16", "float16"),
    ("float32", "float16", "float16"),
    ("float16", "float32", "float16"),
    ("float64", "float64", "float16"),
    ("float16", "bfloat16", "float16"),
    ("float32", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "bfloat16"),
)
"""Dtype of an op's first operand, of its others, and autocast's."""
RAISES = "raises"
UNREACHED_BY_FAKES = kernels.RECURRENT | {"gru_cell", "grid_sampler"}
"""cuDNN casts for the first; the others ask for the device itself."""
CHOSEN_BY_THE_GPU = frozenset(
    {
        *("_convolution.deprecated", "_convolution", "convolution", "conv2d", "conv3d", "conv_transpose2d.input"),
        *("conv_transpose3d.input", "scaled_dot_product_attention"),
    }
)
"""In a build with CUDA these ask the GPU which of their kernels it can run; in a CPU build there is but one."""

Rows = dict[str, dict[str, Any]]


def measure(device: torch.device, names: Collection[str] = ALL.keys()) -> Section:
    """Ask ops on the device and hold them against the emulation."""
    asked = {name for name in names if _is_here(name)}
    skipped = [f"{name}: this build of torch has no such op" for name in sorted(set(names) - asked)]
    with _ignored_warnings():
        if device.type == "cpu":
            beyond = UNREACHED_BY_FAKES | (CHOSEN_BY_THE_GPU if torch.backends.cuda.is_built() else frozenset())
            reason = "a tensor without data does not reach what casts it on a GPU"
            skipped += [f"{name}: {reason}" for name in sorted(asked & beyond)]
            with FakeTensorMode():
                found = _rows(asked - beyond, COMBINATIONS, _autocast_kernels, _fake)
        else:
            combinations = COMBINATIONS
            if not torch.cuda.is_bf16_supported():
                combinations = tuple(one for one in COMBINATIONS if one[2] != "bfloat16")
                skipped.append("autocast in bfloat16: this device has none")
            found = _rows(asked, combinations, lambda lower: torch.autocast("cuda", lower), lambda t: t.to(device))
    expected = emulated(found)
    return Section(rows=found, differences=tuple(differences(found, expected)), skipped=tuple(skipped))


def emulated(names: Collection[str]) -> Rows:
    """The same of the emulation on the CPU, as far as this build of torch has the ops."""
    with _ignored_warnings(), autocast_policy("cuda"):
        here = filter(_is_here, names)
        return _rows(here, COMBINATIONS, lambda lower: torch.autocast("cpu", lower), lambda t: t)


def differences(found: Mapping[str, Any], expected: Rows) -> Iterator[str]:
    """Yield a sentence for each op and combination that has another dtype on the device.

    An op that one build of torch casts and the other does not (CUDA's lists change) is not compared.
    """
    for op, row in found.items():
        ours = expected.get(op)
        if ours is None or ours["listed"] != row["listed"]:
            continue
        for operands, dtype in row["dtypes"].items():
            emulation = ours["dtypes"].get(operands, dtype)
            if emulation != dtype:
                yield f"{op} of {operands}: {dtype} on the device, {emulation} emulated"


def _is_here(name: str) -> bool:
    try:
        overload(name)
    except AttributeError:
        return False
    return name in ALL


def _rows(
    names: Iterable[str],
    combinations: Iterable[tuple[str, str, str]],
    autocast: Callable[[torch.dtype], AbstractContextManager[Any]],
    place: Callable[[torch.Tensor], torch.Tensor],
) -> Rows:
    listed = registered("AutocastCUDA") | kernels.RECURRENT
    rows: Rows = {}
    for name in sorted(names):
        dtypes = {}
        for first, second, lower in combinations:
            arguments = _arguments(name, _maker(first), _maker(second), place)
            with autocast(getattr(torch, lower)):
                dtypes[f"{first} and {second} under {lower}"] = _output_dtype(name, arguments)
        rows[name] = {"listed": name in listed, "dtypes": dtypes}
    return rows


def _arguments(name: str, a: Any, b: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    taken = [argument.name for argument in overload(name)._schema.arguments]  # noqa: SLF001 - no public schema
    given = ALL[name](a, b)
    # lengths of packed sequences stay on the CPU, wherever the sequences are
    return [
        value if argument == "batch_sizes" else tree_map_only(torch.Tensor, place, value)
        for argument, value in zip(taken, given, strict=False)
    ]


def _output_dtype(name: str, arguments: list[Any]) -> str:
    try:
        out = overload(name)(*arguments)
    except RuntimeError:
        return RAISES
    return str((out if isinstance(out, torch.Tensor) else out[0]).dtype).removeprefix("torch.")


def _maker(dtype: str) -> Callable[..., torch.Tensor]:
    return lambda *shape: torch.full(shape, 0.5, dtype=getattr(torch, dtype), device="cpu")


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@contextmanager
def _autocast_kernels(lower: torch.dtype) -> Iterator[None]:
    """Switch CUDA's autocast on where `torch.autocast` refuses to: there is no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", lower)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    """Old ops say that they are old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
