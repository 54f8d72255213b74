"""Half kernels that CUDA has and the CPU lacks: the op runs in fp32 and its result is rounded to fp16.

Which ops: those that torch's own op database declares with float16 on CUDA, and that raise for it on the CPU (2.13).
What
CUDA has no half kernel for either (cdist, ctc_loss, pdist, quantile, linear algebra) still raises, as it would there.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from ampdoctor.precision.emulation.overlay import Kernel
from ampdoctor.precision.emulation.torch_internals import kernel_of, overload

if TYPE_CHECKING:
    from collections.abc import Callable

LEAVES: Final = (
    "avg_pool3d",
    "avg_pool3d_backward",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "multi_margin_loss",
    "multi_margin_loss_backward",
    "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward",
    "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward",
    "_fft_r2c",
    "_fft_c2c",
    "_fft_c2r",
)
"""Ops with a kernel for the CPU key: replaced below autograd, so that forward and backward are both covered."""

COMPOSITES: Final = tuple(
    f"fft_{name}"
    for name in (
        *("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "rfft2", "rfftn", "irfft", "irfft2", "irfftn"),
        *("hfft", "hfft2", "hfftn", "ihfft", "ihfft2", "ihfftn"),
    )
)
"""Ops that refuse half before they reach a kernel: cast around, with autograd watching."""

_UP: Final = {torch.float16: torch.float32, torch.complex32: torch.complex64}
_DOWN: Final = {wide: narrow for narrow, wide in _UP.items()}


def _up(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_UP[value.dtype]) if value.dtype in _UP else value
    return value


def _down(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # ComplexHalf is called experimental, on CUDA too
                return value.to(_DOWN[value.dtype]) if value.dtype in _DOWN else value
        return value.to(_DOWN[value.dtype]) if value.dtype in _DOWN else value
    if isinstance(value, tuple):
        return tuple(_down(item) for item in value)
    return value


def _kernel(name: str, key: str, note: Callable[[str], None]) -> Kernel | None:
    original = kernel_of(name, key)
    if original is None:
        return None
    schema = overload(name)._schema  # noqa: SLF001 - no public schema
    written = [
        index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns_self = name.endswith("_")

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, torch.Tensor) and arg.dtype in _UP for arg in args):
            return original(keyset, *args, **kwargs)
        note(name)
        wide = [_up(arg) for arg in args]
        result = original(keyset, *wide, **{key: _up(arg) for key, arg in kwargs.items()})
        for index in written:
            if index < len(args) and wide[index] is not args[index]:
                args[index].copy_(wide[index])
        return args[0] if returns_self else _down(result)

    return Kernel(name, key, kernel, with_keyset=True)


def half_kernels(note: Callable[[str], None]) -> list[Kernel]:
    """The kernels; `note` is called with an op's name each time that it runs in fp32 instead of half."""
    kernels = [_kernel(name, "CPU", note) for name in LEAVES]
    kernels += [_kernel(name, key, note) for name in COMPOSITES for key in ("AutogradCPU", "CPU")]
    return [kernel for kernel in kernels if kernel is not None]
