from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.errors import UsageError
from ampdoctor.numerics.formats import FORMATS, as_format, round_to
from tests.numerics.data import CASTABLE, brute_round, from_patterns


def all_magnitudes(name: str) -> np.ndarray:
    """Every finite magnitude that a dtype can hold, ascending."""
    dtype = CASTABLE[name]
    values = from_patterns(list(range(2 ** (8 * dtype.itemsize))), dtype).double().numpy()
    return np.unique(np.abs(values[np.isfinite(values)]))


@pytest.mark.parametrize("name", CASTABLE)
def test_a_row_is_what_enumerating_its_dtype_gives(name):
    fmt, values = FORMATS[name], all_magnitudes(name)
    positive = values[values > 0]
    assert fmt.max == positive[-1]
    assert fmt.min_subnormal == positive[0]
    # The smallest normal value starts the first binade that has all its mantissa bits.
    binade = positive[(positive >= fmt.min_normal) & (positive < 2 * fmt.min_normal)]
    assert binade[0] == fmt.min_normal
    assert binade.size == 2**fmt.mantissa_bits


@pytest.mark.parametrize("name", CASTABLE)
def test_the_thresholds_are_where_a_real_cast_turns(name):
    fmt, dtype = FORMATS[name], CASTABLE[name]
    up, down = np.float32(np.inf), np.float32(0)
    flush, over = np.float32(fmt.flush_at), np.float32(fmt.overflow_at)
    just_above = torch.tensor([float(np.nextafter(flush, up))] * 16)
    assert (torch.full((16,), float(flush)).to(dtype).float() == 0).all()
    assert (just_above.to(dtype).double() == fmt.min_subnormal).all()
    below_over = torch.full((16,), float(np.nextafter(over, down)))
    at_over = torch.full((16,), float(over if float(over) >= fmt.overflow_at else np.nextafter(over, up)))
    assert (below_over.to(dtype).double() == fmt.max).all()
    result = at_over.to(dtype).double()
    expected = {"inf": result.isinf(), "nan": result.isnan(), "saturate": result == fmt.max}[fmt.overflow_result]
    assert expected.all()


@pytest.mark.parametrize("name", CASTABLE)
@given(st.data())
def test_rounding_is_torchs_cast(name, data):
    patterns = data.draw(st.lists(st.integers(0, 0x7F7FFFFF), min_size=1))
    values = from_patterns(patterns, torch.float32)
    expected = values.to(CASTABLE[name]).double().numpy()
    np.testing.assert_array_equal(round_to(values.double().numpy(), FORMATS[name]), expected)


@pytest.mark.parametrize("name", FORMATS)
@given(st.lists(st.floats(0.0, allow_infinity=False), min_size=1))
def test_rounding_is_that_of_exact_arithmetic(name, values):
    fmt = FORMATS[name]
    expected = [brute_round(v, fmt) for v in values]
    np.testing.assert_array_equal(round_to(np.array(values), fmt), np.array(expected))


def test_a_format_is_found_by_its_name_or_is_itself():
    assert as_format("fp16") is FORMATS["fp16"]
    assert as_format(FORMATS["bf16"]) is FORMATS["bf16"]
    with pytest.raises(UsageError, match="unknown number format 'fp17'; known are fp16, bf16"):
        as_format("fp17")
