from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.errors import UsageError
from ampdoctor.scaling.trace import Shift, accumulation_shift, divisors, reduction_shift


def test_a_loss_that_is_divided_moves_both_ends():
    assert accumulation_shift(1, 8) == Shift(lowest=3.0, highest=3.0)
    assert accumulation_shift(8, 2) == Shift(lowest=-2.0, highest=-2.0)
    assert accumulation_shift(1, 8, loss_divided=False) == Shift()


def test_sums_in_fp16_take_their_room_from_the_upper_end():
    assert accumulation_shift(1, 8, half_gradients=True) == Shift(lowest=3.0, highest=0.0)
    assert accumulation_shift(1, 8, loss_divided=False, half_gradients=True) == Shift(lowest=0.0, highest=-3.0)


def test_a_reduction_costs_what_its_division_says():
    assert reduction_shift(64, "before") == Shift(lowest=6.0)
    assert reduction_shift(64, "after") == Shift(highest=-6.0)
    assert reduction_shift(64, "split") == Shift(lowest=3.0, highest=-3.0)
    assert reduction_shift(1, "split") == Shift()


@pytest.mark.parametrize("division", ["before", "after", "split"])
def test_the_ends_of_a_reduction_are_where_fp16_says(division):
    ranks, shift = 16, reduction_shift(16, division)
    pre, post = {"before": (ranks, 1), "after": (1, ranks), "split": (4, 4)}[division]

    def reduced(exponent):
        value = torch.tensor(2.0**exponent).half() / pre
        return (value.float() * ranks).half() / post

    assert torch.isfinite(reduced(15 + shift.highest))
    assert not torch.isfinite(reduced(16 + shift.highest))
    assert reduced(-24 + shift.lowest) > 0.0
    assert reduced(-25 + shift.lowest) == 0.0


@pytest.mark.parametrize(
    ("ranks", "flushes", "overflows"),
    [
        (512, 5.0, 4.0),
        (509, 1.0, math.log2(254.5)),
        (100, 3.0, math.log2(12.5)),
        (3, 1.0, math.log2(1.5)),
        (1, 0.0, 0.0),
    ],
)
def test_fsdp_splits_as_its_divisors_say_and_not_in_halves(ranks, flushes, overflows):
    assert reduction_shift(ranks, "split") == Shift(lowest=flushes, highest=-overflows)
    before, after = divisors(ranks, "split")
    assert (math.log2(before), math.log2(after)) == (flushes, overflows)


@pytest.mark.parametrize("call", [lambda: accumulation_shift(1, 0), lambda: reduction_shift(0, "after")])
def test_counts_start_at_one(call):
    with pytest.raises(UsageError, match="start at 1"):
        call()
