"""flash_attn: attention that is `scaled_dot_product_attention` in another layout.

The library's kernels are no torch ops: autocast does not cast their operands. Inputs that they reject raise here, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ampdoctor.errors import ReplayError

_HALVES = (torch.float16, torch.bfloat16)
_WITHOUT = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "return_attn_probs": False}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **more: Any,
) -> Tensor:
    """Attention of (batch, length, heads, size); there may be fewer heads of keys than of queries."""
    if q.dtype not in _HALVES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    for name, without in _WITHOUT.items():
        asked = more.get(name, without)
        if isinstance(asked, Tensor) or asked != without:
            raise ReplayError(f"flash_attn is not installed, and what stands in for it has no {name}")
    times = q.shape[2] // k.shape[2]
    if times > 1:
        k, v = (part.repeat_interleave(times, 2) for part in (k, v))
    queries, keys = q.shape[1], k.shape[1]
    mask = None
    if causal and queries != keys:  # the last query stands at the last key
        mask, causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), False
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    with torch.autocast("cuda", enabled=False):
        found = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=causal, scale=softmax_scale)
    return found.transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of (batch, length, 3, heads, size)."""
    q, k, v = qkv.unbind(2)
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
