"""A histogram times a factor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram


@pytest.mark.parametrize("exponent", [-24, -1, 0, 3, 16])
def test_times_a_power_of_two_it_is_the_histogram_of_the_scaled_elements(exponent):
    values = torch.cat([torch.randn(4096), torch.tensor([0.0, math.nan, math.inf, -math.inf, 2.0**-25])])
    scaled, counted = (h.to_dict() for h in (count(values).scaled(2.0**exponent), count(values * 2.0**exponent)))
    assert math.isclose(float.fromhex(scaled.pop("min_spacing")), 2.0**-149 * 2.0**exponent)
    counted.pop("min_spacing")
    assert scaled == counted


@given(
    st.lists(st.floats(2.0**-140, 2.0**120, width=32), min_size=1, max_size=30),
    st.floats(1e-30, 1e30, exclude_min=True),
)
def test_times_any_factor_it_is_a_histogram_of_as_many_elements(values, factor):
    scaled = count(torch.tensor(values)).scaled(factor)
    assert Histogram.from_dict(scaled.to_dict()) == scaled  # which refuses what no tensor has
    assert scaled.numel == len(values)
    exact = torch.tensor(values).double() * factor
    assert scaled.amax == pytest.approx(exact.max().item(), rel=1e-12)
    assert scaled.amin == pytest.approx(exact.min().item(), rel=1e-12)
