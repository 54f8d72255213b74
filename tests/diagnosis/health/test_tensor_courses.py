"""What is left out because it is certain to be little is little."""

from __future__ import annotations

import numpy as np
import pytest

from ampdoctor.diagnosis.health.tensor_state import LOOKS, breaks


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("floor", [0.003, 0.15])
def test_a_tensor_that_departs_is_never_left_out(floor, new):
    draw = np.random.default_rng(new)
    rates = draw.normal(0, floor, (2000, LOOKS))
    rates[:, -new:] += np.linspace(-40, 40, 2000)[:, None] * floor
    norms = np.exp(rates.cumsum(axis=1))
    norms[::50, 3], norms[1::50, 5], norms[2::50, 7] = np.nan, 0.0, np.inf
    of_all, some = breaks(norms, floor, new, least=0.0), breaks(norms, floor, new, least=14.0)
    told = np.abs(of_all.by) >= 14.0
    assert told.any()
    assert (some.by == 0.0).any()
    assert np.array_equal(some.by[told], of_all.by[told])
    assert np.array_equal(some.rate[told], of_all.rate[told])
    assert (np.abs(some.by[~told]) < 14.0).all()
