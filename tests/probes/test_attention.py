from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.evidence.run_facts import OVERFLOWED
from ampdoctor.probes.formats_seen import softmax_logits


@pytest.mark.parametrize("mask", [-math.inf, -65504.0, -1e9, -1e4, torch.finfo(torch.float32).min])
def test_masks_of_every_kind_are_left_aside(mask):
    logits = torch.tensor([[3.0, -2.0, mask], [1.0, mask, mask], [mask, mask, mask]])
    assert softmax_logits(logits, -1) == 3.0
    assert softmax_logits(logits.T, 0) == 3.0


def test_nothing_to_see_is_none_and_an_overflow_is_infinite():
    assert softmax_logits(torch.tensor([[-5000.0, -5001.0]]), -1) == 5001.0  # all count
    assert softmax_logits(torch.empty(0, 3), -1) is None
    assert softmax_logits(torch.full((2, 2), -math.inf), -1) is None
    assert softmax_logits(torch.tensor([[math.inf, 1.0]]), -1) == OVERFLOWED
    assert softmax_logits(torch.tensor([[math.nan, 1.0]]), -1) is None
    assert softmax_logits(torch.tensor(2.0), 0) == 2.0
