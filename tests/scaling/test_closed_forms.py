from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.errors import UsageError
from ampdoctor.scaling import (
    equilibrium_skip_rate,
    highest_exponent,
    loss_scale_limit,
    lowest_exponent,
    upper_log2,
)
from ampdoctor.scaling.closed_forms import MAX_SPREADS, TAIL, _spreads

# exceeded with the probability `TAIL`, by the finite sum of Abramowitz and Stegun (26.7.3 and 26.7.4)
QUANTILES = [
    (2, 37.963077),
    (10, 4.828681),
    (20, 4.006355),
    (21, 3.972912),
    (25, 3.86896),
    (40, 3.677256),
    (120, 3.482791),
]

# whole ones are exact powers of two, where ties sit; torch casts fp64 to fp16 by way of fp32, so no finer than that
magnitudes = st.one_of(st.integers(-60, 30).map(float), st.integers(-60_000, 30_000).map(lambda n: n / 1024))


def to_fp16(log2_magnitude, exponent):
    return torch.tensor(2.0**log2_magnitude * 2.0**exponent, dtype=torch.float64).to(torch.float16).item()


@given(magnitudes)
def test_the_highest_exponent_is_the_last_that_fits(magnitude):
    s = highest_exponent(magnitude)
    assert math.isfinite(to_fp16(magnitude, s))
    assert to_fp16(magnitude, s + 1) == math.inf


@given(magnitudes)
def test_the_lowest_exponent_is_the_first_that_does_not_flush(magnitude):
    s = lowest_exponent(magnitude)
    assert to_fp16(magnitude, s) > 0.0
    assert to_fp16(magnitude, s - 1) == 0.0


@given(st.floats(1e-3, 1e6))
def test_a_loss_that_stays_fp16_limits_the_scale(loss):
    s = loss_scale_limit(loss)
    assert math.isfinite(to_fp16(math.log2(loss), s))
    assert to_fp16(math.log2(loss), s + 1) == math.inf


def test_a_loss_of_zero_limits_nothing():
    assert loss_scale_limit(0.0) is None


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES)
def test_the_spread_is_multiplied_by_students_quantile_up_to_a_cap(freedom, quantile):
    assert _spreads(TAIL, freedom) == pytest.approx(min(quantile, MAX_SPREADS), abs=6e-4)


@given(st.lists(st.floats(-40, 10), min_size=1, max_size=60))
def test_the_upper_quantile_is_at_least_the_maximum(series):
    assert upper_log2(series, 1e-3) >= max(series)


def test_the_upper_quantile_covers_further_steps():
    generator = torch.Generator().manual_seed(3)
    exceeded = 0
    for _ in range(400):
        draws = torch.randn(51, generator=generator).tolist()
        exceeded += draws[50] > upper_log2(draws[:50], 1e-2)
    assert exceeded / 400 < 0.03


def test_few_steps_are_not_extrapolated_far():
    assert upper_log2([0.0, 0.1], 3.5e-4) < 1.0
    assert upper_log2([-3.0], 3.5e-4) == -3.0
    with pytest.raises(UsageError):
        upper_log2([], 1e-3)


def test_the_defaults_equilibrium():
    assert equilibrium_skip_rate(2.0, 0.5, 2000) == pytest.approx(math.log(2) / 2000)
    assert equilibrium_skip_rate(2.0, 0.75, 1000) == pytest.approx(1.2277e-3, rel=1e-3)
    for bad in ((1.0, 0.5, 2000), (2.0, 1.0, 2000), (2.0, 0.0, 2000), (2.0, 0.5, 0)):
        with pytest.raises(UsageError):
            equilibrium_skip_rate(*bad)
