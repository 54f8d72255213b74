from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ampdoctor.ranges import profile as collecting
from ampdoctor.ranges.profile import EXPONENTS, FP8
from ampdoctor.ranges.profile_file import pack
from tests.ranges.known import collected, place, values

OUT, GRAD, BIAS = place("fc"), place("fc.weight", "weight_grad"), place("fc.bias", "weight_grad")
SEEN, WEIGHT = place("fc", "activation"), place("fc.weight", "weight")


def three_steps():
    return [
        {
            OUT: values(-22 + step, seed=step, zeros=100, count=20_000),
            GRAD: values(-12, seed=10 + step, count=20_000),
            BIAS: values(-30, seed=20 + step, count=30),
            SEEN: values(2, seed=30 + step),
        }
        for step in range(3)
    ]


def same(one, other):
    (arrays, facts), (others, other_facts) = pack(one), pack(other)
    assert facts == other_facts
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(array, others[name], rtol=1e-12, err_msg=name)


def by_cast(tensor, exponent):
    """(share of the nonzero that is zero in fp16, relative error of what does not overflow) at a scale."""
    nonzero = tensor[tensor != 0].double()
    scaled = nonzero * 2.0 ** int(exponent)
    cast = scaled.half().double()
    return (cast == 0).double().mean().item(), ((cast - scaled).norm() / scaled.norm()).item()


def test_each_step_has_its_maxima_counts_and_powers():
    steps = three_steps()
    profile = collected(steps)
    assert [site.place for site in profile.sites] == [OUT, BIAS, GRAD, SEEN]
    assert profile.gradients == 3
    for row, step in enumerate(steps):
        for column, site in enumerate(profile.sites):
            tensor = step[site.place]
            assert profile.series.amax[row, column] == tensor.abs().max().item()
            if column < 3:
                assert profile.series.nonzero[row, column] == (tensor != 0).sum().item()
                power = tensor.double().square().sum().item()
                assert profile.series.power[row, column] == pytest.approx(
                    power, rel=0.1 if site.place == BIAS else 0.02
                )


def test_each_step_has_the_curves_that_casts_have():
    steps = three_steps()
    series = collected(steps).series
    for row, step in enumerate(steps):
        for column, where in enumerate((OUT, BIAS, GRAD)):
            for index, exponent in enumerate(EXPONENTS):
                flushed, error = by_cast(step[where], exponent)
                assert series.flushed[row, column, index] == pytest.approx(flushed, abs=1e-7)
                if math.isfinite(error) and where != BIAS:  # 30 values are too few for a mean
                    assert series.error[row, column, index] == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("fmt", FP8)
def test_eight_bit_formats_are_scaled_to_fit_in_each_step(fmt):
    # the sizes of the steps lie 12 binades apart: scaled once for all of them, the small one would flush
    steps = [{OUT: values(size, seed=size, count=20_000)} for size in (0, -12)]
    together = collected(steps).fp8[0, FP8.index(fmt)]
    apart = sum(collected([step]).fp8[0, FP8.index(fmt)] for step in steps)
    assert together.tolist() == pytest.approx(apart.tolist(), rel=1e-12)
    assert together[0] < 0.02 * 40_000
    assert math.sqrt(together[2]) == pytest.approx(math.sqrt(apart[2]), rel=1e-12)


def test_the_order_of_arrival_does_not_matter_and_neither_do_blocks(monkeypatch):
    steps = three_steps()
    usual = collected(steps)
    same(usual, collected([dict(reversed(step.items())) for step in steps]))
    monkeypatch.setattr(collecting, "_AT_ONCE", 1)
    same(usual, collected(steps))


def test_a_place_that_rests_or_comes_late_has_zeros_in_its_series():
    profile = collected([{OUT: values(0)}, {GRAD: values(0)}, {OUT: values(1), GRAD: torch.zeros(4)}])
    assert [site.place for site in profile.sites] == [OUT, GRAD]
    assert (profile.series.amax > 0).tolist() == [[True, False], [False, True], [True, False]]
    assert (profile.series.nonzero > 0).tolist() == [[True, False], [False, True], [True, False]]
    assert not profile.series.flushed[1, 0].any()
    assert not profile.series.error[2, 1].any()
    assert profile.histograms[1].zeros == 4


def test_only_a_weight_gradient_that_is_not_finite_makes_a_maximum_infinite():
    for bad in (math.inf, -math.inf, math.nan):
        broken = torch.tensor([1.0, bad, 3.0])
        profile = collected([{OUT: broken, GRAD: broken, SEEN: broken}])
        assert profile.series.amax.tolist() == [[3.0, math.inf, 3.0]]
        assert profile.series.nonzero.tolist() == [[2, 2]]
        assert np.isfinite(profile.series.power).all()


def test_weights_are_no_step_and_each_has_its_size():
    profile = collected([{OUT: values(0)}], weights={WEIGHT: values(-4)}, sizes={"fc": 0}, wide=("fc.weight",))
    assert profile.steps == 1
    assert [(site.kind, site.half, site.weight) for site in profile.sites] == [
        ("activation_grad", True, 1),
        ("weight", False, 1),
    ]
    assert profile.series.amax.tolist() == [[values(0).abs().max().item(), 0.0]]
