from __future__ import annotations

import numpy as np
import pytest

from ampdoctor.diagnosis.health.tensor_state import medians


@pytest.mark.parametrize("looks", [1, 2, 3, 12, 13])
def test_it_is_numpys_median_row_by_row(looks):
    values = np.random.default_rng(looks).normal(size=(50, looks))
    values[3, 0] = values[7, -1] = np.nan
    values[5, :] = np.inf
    values[6, 0] = -np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(medians(values), np.median(values, axis=1))
