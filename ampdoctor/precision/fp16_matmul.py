"""Half products on a CPU through its fp32 kernels.

A plain fp16 product of a CPU without AVX512-FP16 or AMX-FP16 takes 35 times as long as the fp32 one (measured, 256 x
768 x 768, one thread of an AVX512 machine: 187 ms against 5.4). Both accumulate in fp32 and round the result once, as
tensor cores do. So operands are widened, multiplied in fp32, and the result is rounded; on every CPU alike, so that a
report does not depend on the machine. This happens below autograd: backwards, double backwards, checkpointed parts and
`vmap` are covered, and modes that trace ops see the program's own.

Attention is written out, because its inner roundings decide which non-finite values appear: see `_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ampdoctor.precision.kernels import BoxedKernel, Kernel, SharedOverlay, kernel_of, narrowed, widened

HALF: Final = torch.float16
LEAST: Final = 2**14  # multiplications from which on the fp32 path is faster (`benchmarks/half_products.py`)
LEAST_CONVOLUTION: Final = 2**16
LEAST_ATTENTION: Final = 2**21


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


# -- attention -----------------------------------------------------------------------------------------------------

ATTENTION: Final = "_scaled_dot_product_flash_attention_for_cpu"
SCORES: Final = 2**24  # scores that are held at once, 64 MiB of fp32: queries are taken in blocks of rows


class _Heads(NamedTuple):
    """Query, key and value of an attention in fp32, heads first: (batch, heads, length, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    shared: int  # heads of the query for one of the key (grouped-query attention)
    scale: float  # of the scores

    def blocks(self) -> Iterator[slice]:
        batch, heads, rows, _ = self.query.shape
        step = max(SCORES // max(batch * heads * self.key.shape[2], 1), 1)
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def scores(self, rows: slice, mask: Tensor | None, *, causal: bool) -> Tensor:
        """Scaled and masked scores of some rows, fp32: neither CUDA's flash attention nor the CPU's rounds them."""
        scores = (self.query[:, :, rows] @ self.key.mT).mul_(self.scale)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., rows, :]
        if causal:
            columns = torch.arange(scores.shape[-1])
            scores.masked_fill_(columns > torch.arange(rows.start, rows.stop).unsqueeze(1), -math.inf)
        return scores


def _heads(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> _Heads:
    shared = query.shape[1] // key.shape[1]
    key, value = key.float(), value.float()
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return _Heads(query.float(), key, value, shared, query.shape[-1] ** -0.5 if scale is None else scale)


def _rounded(tensor: Tensor) -> Tensor:
    return tensor.to(HALF).float()


def _length_first(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Empty (batch, heads, length, ...), in the memory order that the op uses for all but its result."""
    batch, heads, length, *width = shape
    return torch.empty(batch, length, heads, *width, dtype=dtype).transpose(1, 2)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,  # noqa: ARG001 - the op's signature; the CPU's has none
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the op's signature
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The result and each row's logsumexp; only the undivided probabilities are rounded (Dao 2023, algorithm 1)."""
    heads = _heads(query, key, value, scale)
    mask = None if attn_mask is None else attn_mask.float()
    result = torch.empty_like(query)  # in the query's memory order, as the op's own: a user may `view` it
    logsumexp = _length_first(query.shape[:3], torch.float32)
    for rows in heads.blocks():
        scores = heads.scores(rows, mask, causal=is_causal)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -math.inf, 0.0)  # a fully masked row has the result 0
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        total.masked_fill_(total == 0, 1.0)
        result[:, :, rows] = (_rounded(weights) @ heads.value).div_(total).to(HALF)
        logsumexp[:, :, rows] = total.log_().add_(top).squeeze(-1)
    return result, logsumexp


def _attention_backward(  # noqa: PLR0917 - the op's signature
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,  # noqa: ARG001 - the op's signature
    is_causal: bool,  # noqa: FBT001 - the op's signature
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, half; the probabilities and the scores' gradient are rounded (Dao 2023, algorithm 2)."""
    heads = _heads(query, key, value, scale)
    mask = None if attn_mask is None else attn_mask.float()
    grad_query = torch.empty_like(heads.query)
    grad_key, grad_value = torch.zeros_like(heads.key), torch.zeros_like(heads.value)
    for rows in heads.blocks():
        scores = heads.scores(rows, mask, causal=is_causal)
        weights = scores.sub_(logsumexp[:, :, rows].unsqueeze(-1)).exp_()
        grad = grad_out[:, :, rows].float()
        grad_value += _rounded(weights).mT @ grad
        inner = (grad * out[:, :, rows]).sum(-1, keepdim=True)
        of_scores = _rounded((grad @ heads.value.mT).sub_(inner).mul_(weights))
        grad_query[:, :, rows] = (of_scores @ heads.key).mul_(heads.scale)
        grad_key += (of_scores.mT @ heads.query[:, :, rows]).mul_(heads.scale)
    return (
        _as_given(grad_query, query, 1),
        _as_given(grad_key, key, heads.shared),
        _as_given(grad_value, value, heads.shared),
    )


def _as_given(gradient: Tensor, like: Tensor, shared: int) -> Tensor:
    if shared > 1:
        gradient = gradient.unflatten(1, (like.shape[1], shared)).sum(2)
    return _length_first(like.shape, HALF).copy_(gradient)


def _attention_kernels() -> Iterator[Kernel]:
    for name, written, halves in ((ATTENTION, _attention, 3), (f"{ATTENTION}_backward", _attention_backward, 5)):
        original = kernel_of(name, "CPU")
        if original is not None:
            yield Kernel(name, "CPU", _choosing(original, written, halves), with_keyset=True)


def _choosing(original: BoxedKernel, written: Callable[..., Any], halves: int) -> Callable[..., Any]:
    """The written form where all operands are half, of one width, and large enough; else the plain kernel."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        query, key, value = args[:3] if halves == 3 else args[1:4]
        enough = query.numel() * key.shape[2] >= LEAST_ATTENTION
        if _is_half(args[:halves]) and enough and query.shape[-1] == value.shape[-1]:
            _SHARED.used = True
            return written(*args, **kwargs)
        return original(keyset, *args, **kwargs)

    return kernel


# -- regions ---------------------------------------------------------------------------------------------------------


def _every_kernel() -> Iterator[Kernel | None]:
    yield from (_kernel(name, *product) for name, product in PRODUCTS.items())
    yield from _attention_kernels()


_SHARED = SharedOverlay(_every_kernel)


@contextmanager
def half_products() -> Iterator[SharedOverlay]:
    """Run fp16 products, convolutions and attention on the CPU through fp32 kernels, rounded once, in every thread."""
    with _SHARED.region():
        yield _SHARED
