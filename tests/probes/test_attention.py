from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.evidence.run_facts import OVERFLOWED
from ampdoctor.probes import formats_seen
from ampdoctor.probes.formats_seen import attention_logits, softmax_logits


def by_hand(q, k, *, mask=None, scale=None):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = q @ k.transpose(-1, -2) * scale
    return float((logits if mask is None else logits[mask.expand_as(logits)]).abs().max())


@pytest.mark.parametrize("chunk", [7, 64, 1 << 22])
def test_the_largest_logit_does_not_depend_on_how_it_is_cut(monkeypatch, chunk):
    monkeypatch.setattr(formats_seen, "CHUNK", chunk)
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)
    assert attention_logits({"query": q, "key": k}) == pytest.approx(by_hand(q, k))


def test_a_scale_of_its_own_is_used():
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4)
    assert attention_logits({"query": q, "key": k, "scale": 3.0}) == pytest.approx(by_hand(q, k, scale=3.0))


def test_what_a_mask_hides_does_not_count():
    q, k = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
    k[..., 3, :] = 1000.0
    shown = torch.ones(4, 4, dtype=torch.bool)
    shown[:, 3] = False
    shown[0] = False  # a row of padding, masked as a whole
    expected = by_hand(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert attention_logits({"query": q, "key": k, "attn_mask": shown}) == pytest.approx(expected)
    added = torch.zeros(4, 4).masked_fill(~shown, -1e4)
    assert attention_logits({"query": q, "key": k, "attn_bias": added * 1e3}) == pytest.approx(expected)


def test_causal_attention_sees_no_later_key():
    q, k = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    k[..., 2, :] = 50.0
    call = {"query": q[..., :2, :], "key": k, "is_causal": True}
    assert attention_logits(call) == pytest.approx(by_hand(q[..., :1, :], k[..., :1, :]))


def test_groups_of_queries_share_a_key():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    assert attention_logits({"query": q, "key": k}) == pytest.approx(by_hand(q, k.repeat_interleave(2, 1)))


@pytest.mark.parametrize("mask", [-math.inf, -65504.0, -1e9, -1e4, torch.finfo(torch.float32).min])
def test_masks_of_every_kind_are_left_aside(mask):
    logits = torch.tensor([[3.0, -2.0, mask], [1.0, mask, mask], [mask, mask, mask]])
    assert softmax_logits(logits, -1) == 3.0
    assert softmax_logits(logits.T, 0) == 3.0


def test_a_row_of_large_negative_logits_that_all_count_is_large():
    assert softmax_logits(torch.tensor([[-5000.0, -5001.0]]), -1) == 5001.0


def test_nothing_to_see_is_none_and_an_overflow_is_infinite():
    assert softmax_logits(torch.empty(0, 3), -1) is None
    assert softmax_logits(torch.full((2, 2), -math.inf), -1) is None
    assert softmax_logits(torch.tensor([[math.inf, 1.0]]), -1) == OVERFLOWED
    assert softmax_logits(torch.tensor([[math.nan, 1.0]]), -1) is None
    assert softmax_logits(torch.tensor(2.0), 0) == 2.0
