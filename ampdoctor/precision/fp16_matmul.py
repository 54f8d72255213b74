"""Half products on a CPU through its fp32 kernels.

A plain fp16 product of a CPU without AVX512-FP16 or AMX-FP16 takes 35 times as long as the fp32 one (measured, 256 x
768 x 768, one thread of an AVX512 machine: 187 ms against 5.4). Both accumulate in fp32 and round the result once, as
tensor cores do. So operands are widened, multiplied in fp32, and the result is rounded; on every CPU alike, so that a
report does not depend on the machine. This happens below autograd: backwards, double backwards, checkpointed parts and
`vmap` are covered, and modes that trace ops see the program's own.

Fused attention keeps the CPU's own kernel, whose inner roundings are flash attention's: they decide which non-finite
values appear, and fp32 all through would hide some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from ampdoctor.precision.kernels import Kernel, SharedOverlay, kernel_of, narrowed, widened

HALF: Final = torch.float16
LEAST: Final = 2**14  # multiplications from which on the fp32 path is faster (`benchmarks/half_products.py`)
LEAST_CONVOLUTION: Final = 2**16


def _of_matrices(first: int) -> Callable[[tuple[Any, ...]], int]:
    """Counts multiplications of a product of (b x) m x k by (b x) k x n; `first` is the index of the first factor."""

    def count(args: tuple[Any, ...]) -> int:
        return int(args[first].numel() * args[first + 1].shape[-1])

    return count


def _of_convolution(args: tuple[Any, ...]) -> int:
    """A lower bound for a convolution of stride 1: each place of the input with the whole kernel."""
    source, weight = args[0], args[1]
    return int(source.numel() // max(source.shape[1], 1) * weight.numel())


PRODUCTS: Final = {
    "mm": (_of_matrices(0), LEAST),
    "bmm": (_of_matrices(0), LEAST),
    "addmm": (_of_matrices(1), LEAST),
    "baddbmm": (_of_matrices(1), LEAST),
    "_addmm_activation": (_of_matrices(1), LEAST),
    "convolution": (_of_convolution, LEAST_CONVOLUTION),
    "convolution_backward": (lambda args: _of_convolution(args[1:]), LEAST_CONVOLUTION),
}  # ops on the fp32 path (not in place or into `out`), with the number of multiplications from which on they take it.
# Not `addbmm`, which rounds between batches, nor `mv`.


def _is_half(args: tuple[Any, ...]) -> bool:
    """Whether every tensor argument is half: the plain kernel rejects mixed formats."""
    return all(arg.dtype is HALF for arg in args if isinstance(arg, torch.Tensor))


def _kernel(name: str, multiplications: Callable[..., int], least: int) -> Kernel | None:
    original = kernel_of(name, "CPU")
    if original is None:
        return None

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not _is_half(args) or multiplications(args) < least:
            return original(keyset, *args, **kwargs)
        _SHARED.used = True
        return narrowed(original(keyset, *map(widened, args), **kwargs))

    return Kernel(name, "CPU", kernel, with_keyset=True)


_SHARED = SharedOverlay(lambda: (_kernel(name, *product) for name, product in PRODUCTS.items()))


@contextmanager
def half_products() -> Iterator[SharedOverlay]:
    """Run fp16 products and convolutions on the CPU through fp32 kernels, rounded once, in every thread."""
    with _SHARED.region():
        yield _SHARED
