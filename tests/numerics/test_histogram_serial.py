from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.errors import UsageError
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram
from tests.numerics.data import DTYPES, tensors


@given(st.lists(st.sampled_from(DTYPES).flatmap(tensors), max_size=3))
def test_the_round_trip_through_json_is_exact(parts):
    histogram = sum((count(p) for p in parts), Histogram.empty())
    text = json.dumps(histogram.to_dict(), allow_nan=False)
    again = Histogram.from_dict(json.loads(text))
    assert again == histogram
    assert (again.amax, again.amin, again.numel) == (histogram.amax, histogram.amin, histogram.numel)
    np.testing.assert_array_equal(again.counts, histogram.counts)
    assert again.relative_error("e5m2") == histogram.relative_error("e5m2")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"zeros": -1},
        {"zeros": True},
        {"neg_infs": 2**60},
        {"nans": 1.5},
        {"bins": [5]},
        {"bins": "ab", "counts": "ab"},
        {"bins": [5, 5], "counts": [1, 1]},
        {"bins": [1023, 1015], "counts": [1, 1]},
        {"bins": [-1, 1016], "counts": [1, 1]},
        {"bins": [1016, 2041], "counts": [1, 1]},
        {"counts": [0, 1]},
        {"amax": None},
        {"amax": 3.0},
        {"amax": "inf"},
        {"amax": "0x1p+5"},
        {"amin": "0x1p-1"},
        {"min_spacing": "-0x1p+0"},
        {"min_spacing": "0x1p+99999"},
        {"bins": [], "counts": []},
    ],
)
def test_data_that_contradict_themselves_are_refused(change):
    data = count(torch.tensor([1.0, 2.0])).to_dict()
    assert Histogram.from_dict(data).numel == 2
    with pytest.raises(UsageError, match="histogram data"):
        Histogram.from_dict({**data, **change})


def test_a_missing_key_is_refused():
    data = count(torch.tensor([1.0, 2.0])).to_dict()
    for key in data:
        with pytest.raises(UsageError, match="histogram data"):
            Histogram.from_dict({k: v for k, v in data.items() if k != key})
