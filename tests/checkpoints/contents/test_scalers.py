"""Numbers of a scaler's state, as files hold them."""

from __future__ import annotations

import math

import pytest

from ampdoctor.checkpoints.scalers import number


@pytest.mark.parametrize(
    ("value", "read"),
    [(2, 2.0), (0.5, 0.5), (2**1022, 2.0**1022), (10**400, None), (-(10**400), None), (math.inf, math.inf)],
)
def test_an_integer_beyond_floats_is_no_number(value, read):
    assert number(value) == read


@pytest.mark.parametrize("value", [True, None, "2", [2.0]])
def test_what_is_no_number_is_none(value):
    assert number(value) is None
