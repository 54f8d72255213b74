"""flash_attn and xformers: attention that is `scaled_dot_product_attention` in another layout.

The libraries' kernels are no torch ops: autocast does not cast their operands. Inputs that they reject raise here, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ampdoctor.errors import ReplayError

_HALVES = (torch.float16, torch.bfloat16)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **_more: Any,
) -> Tensor:
    """Attention of (batch, length, heads, size); there may be fewer heads of keys than of queries."""
    if q.dtype not in _HALVES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if softcap or return_attn_probs:
        asked = "softcap" if softcap else "return_attn_probs"
        raise ReplayError(f"flash_attn is not installed, and what stands in for it has no {asked}")
    if alibi_slopes is None and window_size == (-1, -1) and (not causal or q.shape[1] == k.shape[1]):
        return _attention(q, k, v, None, dropout_p, softmax_scale, causal=causal)
    mask = _mask(q.shape[1], k.shape[1], causal=causal, window=window_size)
    if alibi_slopes is not None:
        mask = _alibi(alibi_slopes, q.shape[1], k.shape[1], q.dtype).masked_fill(~mask, -math.inf)
    return _attention(q, k, v, mask, dropout_p, softmax_scale)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of (batch, length, 3, heads, size)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention whose keys and values are (batch, length, 2, heads, size)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attention of (tokens, heads, size), sequence by sequence; `cu_seqlens_...` has the start of each."""
    at_q, at_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], *args, **kwargs)[0]
        for a, b, c, d in zip(at_q, at_q[1:], at_k, at_k[1:], strict=False)
    ]
    return torch.cat(parts)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Attention of (tokens, 3, heads, size), sequence by sequence."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[Any, ...]:
    """The unmasked tokens, their indices, the start of each sequence, the longest length, and the used counts."""
    counted = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = counted.sum(dim=-1, dtype=torch.int32)
    indices = counted.flatten().nonzero().flatten()
    begins = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, begins, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The tokens at their places in (batch, length, ...), and zeros elsewhere."""
    whole = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return whole.index_copy(0, indices, hidden_states).reshape(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """The rows at `indices`."""
    return tensor[indices]


class LowerTriangularMask:
    """xformers' causal mask: query i sees the keys up to i, whatever the lengths."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    **_more: Any,
) -> Tensor:
    """Attention of (batch, length, heads, size), or of (batch, length, size)."""
    if query.dim() == 3:
        q, k, v = (part.unsqueeze(2) for part in (query, key, value))
        return memory_efficient_attention(q, k, v, attn_bias, p, scale).squeeze(2)
    if isinstance(attn_bias, LowerTriangularMask):
        attn_bias = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()
    elif attn_bias is not None and not isinstance(attn_bias, Tensor):
        raise ReplayError(
            f"xformers is not installed, and what stands in for it has no attention bias {type(attn_bias).__name__}"
        )
    return _attention(query, key, value, attn_bias, p, scale)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    *,
    causal: bool = False,
) -> Tensor:
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    times = q.shape[2] // k.shape[2]
    if times > 1:
        k, v = (part.repeat_interleave(times, 2) for part in (k, v))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    with torch.autocast("cuda", enabled=False):
        found = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, scale=scale)
    return found.transpose(1, 2)


def _mask(queries: int, keys: int, *, causal: bool, window: tuple[int, int]) -> Tensor:
    """Which query sees which key; the last query is aligned with the last key."""
    left, right = window
    right = 0 if causal else right
    ahead = _ahead(queries, keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if right >= 0:
        seen &= ahead <= right
    if left >= 0:
        seen &= ahead >= -left
    return seen


def _ahead(queries: int, keys: int) -> Tensor:
    """By how many positions each key is ahead of each query."""
    return torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]


def _alibi(slopes: Tensor, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    return (-slopes[..., None, None] * _ahead(queries, keys).abs()).to(dtype)
