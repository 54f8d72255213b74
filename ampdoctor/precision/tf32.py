"""TF32 on a CPU, where torch's switches do nothing.

A tensor core rounds fp32 operands to 10 mantissa bits and accumulates in fp32. `tf32()` rounds the operands of matrix
products and convolutions like that, below autograd, so that the products of a backward pass are included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampdoctor.precision.kernels import Kernel, SharedOverlay, kernel_of

_DROPPED_BITS: Final = 13  # fp32 has 23 mantissa bits, TF32 10
_MASK: Final = -(1 << _DROPPED_BITS)

OPERANDS: Final = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "_addmm_activation": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "addbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "mkldnn_rnn_layer": (0, 1, 2),
    "mkldnn_rnn_layer_backward": (0, 1, 2),
}  # ops that use tensor cores, and which arguments are factors (a bias or an accumulator stays fp32)


def round_to_tf32(tensor: Tensor) -> Tensor:
    """Round an fp32 tensor to TF32's 10 mantissa bits, ties to even, without gradient; TypeError for another dtype.

    The exponent range is fp32's: subnormals keep their spacing of 2^-136, a value beyond TF32's largest finite one
    becomes infinite, NaN and Inf stay.
    """
    if tensor.dtype is not torch.float32:
        raise TypeError(f"round_to_tf32 takes float32, not {tensor.dtype}")
    source = tensor.detach()
    bits = source.contiguous().view(torch.int32)
    tie = (bits >> _DROPPED_BITS) & 1
    rounded = ((bits + ((1 << (_DROPPED_BITS - 1)) - 1) + tie) & _MASK).view(torch.float32)
    # Adding to a NaN's mantissa could carry into the exponent, or the sign.
    return torch.where(source.isnan(), source, rounded)


def _kernel(name: str, positions: tuple[int, ...]) -> Kernel | None:
    original = kernel_of(name, "CPU")
    if original is None:
        return None

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        rounded = [
            round_to_tf32(arg)
            if i in positions and isinstance(arg, torch.Tensor) and arg.dtype is torch.float32 and not arg.is_sparse
            else arg
            for i, arg in enumerate(args)
        ]
        return original(keyset, *rounded, **kwargs)

    return Kernel(name, "CPU", kernel, with_keyset=True)


_SHARED = SharedOverlay(lambda: (_kernel(name, positions) for name, positions in OPERANDS.items()))


@contextmanager
def tf32() -> Iterator[None]:
    """Run fp32 matrix products and convolutions on the CPU as TF32, forward and backward, in every thread.

    The backward pass must run inside too. Attention is computed by its matrix products, since the fused kernel hides
    the second one's operand. Matrix-vector products stay fp32, as in cuBLAS, which uses no tensor cores for them. On a
    torch without `get_kernel`, recurrent layers stay fp32.
    """
    with _SHARED.region(), sdpa_kernel(SDPBackend.MATH):
        yield
