"""The largest logit that a softmax or a fused attention takes, what is masked out left aside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.of_runs.modules import OVERFLOWED
from ampdoctor.numerics.tensors import Unseen

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 22
"""Logits that exist at a time."""
REACH = 104.0
"""exp(-104) is below 2^-149 / 2: what lies further under its row's maximum has a weight of zero in fp32 as well, be it
masked or not."""
MASKED = -8192.0
"""A row that stays below this is masked as a whole: masks are written as -1e4 or less, and scores are added to some."""


def softmax_logits(logits: Tensor, dim: int) -> float | None:
    """Largest magnitude among the logits that get any weight.

    Args:
        logits: What a softmax reads, of any shape and floating-point dtype.
        dim: The dimension that it normalises.

    Returns:
        `OVERFLOWED` where a logit is +inf; None where there is no logit, or all are masked.
    """
    if not logits.numel():
        return None
    with Unseen(logits):
        rows = logits.detach().movedim(dim, -1) if logits.dim() else logits.detach().reshape(1, 1)
        return _largest(rows)


def attention_logits(call: Mapping[str, Any]) -> float | None:
    """Largest magnitude among the logits of a fused attention, recomputed in fp32 a part at a time.

    Args:
        call: The kernel's arguments by name: `query` of shape (..., L, d), `key` (..., S, d), with fewer heads where
            groups of queries share them, and what of `attn_mask`, `attn_bias`, `is_causal`, `scale` it has.

    Returns:
        None where there is no logit, or all are masked.
    """
    query, key = call["query"].detach(), call["key"].detach()
    mask = call.get("attn_mask") if call.get("attn_mask") is not None else call.get("attn_bias")
    scale = call.get("scale") or 1.0 / math.sqrt(query.shape[-1])
    if not query.numel() or not key.numel():
        return None
    with Unseen(query):
        if query.dim() > 2 and query.shape[-3] != key.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        heads = query.shape[-3] if query.dim() > 2 else 1
        length, keys = query.shape[-2], key.shape[-2]
        if mask is not None:
            mask = mask.detach().expand(*query.shape[:-1], keys)
        rows = max(CHUNK // (heads * keys), 1)
        largest: float | None = None
        for index in product(*map(range, query.shape[:-3])):
            for begin in range(0, length, rows):
                part = slice(begin, begin + rows)
                logits = query[index][..., part, :].float() @ key[index].float().mT * scale
                if call.get("is_causal"):
                    hidden = torch.ones(length, keys, dtype=torch.bool, device=query.device).triu(1)
                    logits.masked_fill_(hidden[part], -math.inf)
                if mask is not None:
                    shown = mask[index][..., part, :]
                    logits = logits.masked_fill(~shown, -math.inf) if shown.dtype == torch.bool else logits + shown
                found = _largest(logits)
                largest = found if largest is None else largest if found is None else max(largest, found)
        return largest


def _largest(rows: Tensor) -> float | None:
    """Of rows in the last dimension."""
    values = rows if rows.dtype == torch.float64 else rows.float()
    top = values.amax(-1, keepdim=True)
    counted = (values >= top - REACH) & (top > MASKED)
    found = float(torch.where(counted, values.abs(), -1.0).max())
    return min(found, OVERFLOWED) if found >= 0.0 else None
