"""Names of ops as users know them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_OPERATORS = {
    "truediv": "div",
    "rdiv": "div",
    "rtruediv": "div",
    "itruediv": "div_",
    "idiv": "div_",
    "floordiv": "floor_divide",
    "radd": "add",
    "iadd": "add_",
    "rsub": "rsub",
    "isub": "sub_",
    "rmul": "mul",
    "imul": "mul_",
    "rmatmul": "matmul",
    "cross_entropy": "cross_entropy_loss",
    "rpow": "pow",
    "ipow": "pow_",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
}
CASTS = frozenset({"_to_copy", "copy_", "to", "half", "float", "bfloat16", "double", "type", "type_as"})
"""Kernels and methods whose only work is another dtype."""
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "resize_",
        "resize_as_",
        "_resize_output_",
    }
)
"""Kernels whose results hold whatever the memory held: never a birth, and nothing to look at."""
LAYOUTS = frozenset({"as_strided", "as_strided_", "_reshape_alias", "set_", "set", "view.dtype"})
"""Ops that read memory as it lies: on a copy in another format they read other elements, and cannot be run again."""
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
"""In-place kernels that do not read what they overwrite."""
CONSTANTS = frozenset(
    {
        "fill_",
        "full",
        "full_like",
        "new_full",
        "masked_fill",
        "masked_fill_",
        "scalar_tensor",
        "lift_fresh",
        "lift_fresh_copy",
        "where",
        "index_fill",
        "index_fill_",
        "constant_pad_nd",
    }
)
"""Kernels that write a number the user gave: an infinity there is meant."""
PICKS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
"""Kernels that take the value of one class from each row, and add those up."""
SUMS = frozenset({"sum", "mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "linalg_vector_norm"}) | PICKS
"""Kernels that add up what they read: an infinity that masks elsewhere counts there like any other number."""


def function_name(function: Callable[..., Any]) -> str | None:
    """The aten name of a torch function or method ("linear", "mul"); None where it is no aten op."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or name in ("__get__", "__set__"):
        return None
    bare = name.strip("_") if name.startswith("__") else name
    bare = _OPERATORS.get(bare, bare)
    return bare if is_aten(bare) or is_cast(bare) else None


@lru_cache(maxsize=4096)
def is_aten(name: str) -> bool:
    """There is an ATen op of this name."""
    return hasattr(torch.ops.aten, name)


def kernel_name(overload: Any) -> str:
    """The name of an ATen overload without namespace and overload ("addmm", "mul_")."""
    name = str(overload.__name__).partition(".")[0]
    return name.removeprefix("_foreach_")


def reshapes(overload: Any) -> bool:
    """It changes how a tensor shows its memory, in place, and no value (`transpose_`, `squeeze_`, `set_`)."""
    return torch.Tag.inplace_view in getattr(overload, "tags", ())


@lru_cache(maxsize=1024)
def changes_shape(name: str | None) -> bool:
    """The torch function of this name is one that `reshapes`."""
    packet = getattr(torch.ops.aten, name, None) if name is not None else None
    return packet is not None and any(reshapes(getattr(packet, each)) for each in packet.overloads())


def reads_layout(overload: Any) -> bool:
    """It is one of `LAYOUTS`."""
    return kernel_name(overload) in LAYOUTS or str(overload.__name__) in LAYOUTS


def user_level(kernel: str) -> str:
    """The op that a kernel with a leading underscore implements ("_softmax": "softmax"), where there is one."""
    public = kernel.lstrip("_")
    return public if public != kernel and is_aten(public) else kernel


def is_cast(name: str) -> bool:
    """The op only changes the dtype."""
    return name in CASTS
