from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.errors import UsageError
from ampdoctor.numerics.formats import FORMATS, as_format, round_to
from ampdoctor.numerics.tensors import E8M0
from tests.numerics.data import CASTABLE, brute_round, from_patterns

ENUMERABLE = [name for name in CASTABLE if CASTABLE[name].itemsize <= 2]


def all_magnitudes(name: str) -> np.ndarray:
    """Every finite magnitude that a dtype can hold, ascending."""
    dtype = CASTABLE[name]
    values = from_patterns(list(range(2 ** (8 * dtype.itemsize))), dtype).double().numpy()
    return np.unique(np.abs(values[np.isfinite(values)]))


@pytest.mark.parametrize("name", ENUMERABLE)
def test_a_row_is_what_enumerating_its_dtype_gives(name):
    fmt, values = FORMATS[name], all_magnitudes(name)
    positive = values[values > 0]
    above_one = values[values > 1.0]
    assert fmt.has_zero == (values[0] == 0.0)
    assert fmt.max == positive[-1]
    assert fmt.min_subnormal == positive[0]
    assert fmt.eps == above_one[0] - 1.0
    assert fmt.significand_bits == 1 - int(math.log2(fmt.eps))
    # The smallest normal value starts the first binade that has all its mantissa bits.
    binade = positive[(positive >= fmt.min_normal) & (positive < 2 * fmt.min_normal)]
    assert binade[0] == fmt.min_normal
    assert binade.size == 2**fmt.mantissa_bits
    assert fmt.exponent_bits + fmt.mantissa_bits == 8 * CASTABLE[name].itemsize - (1 if fmt.has_zero else 0)


@pytest.mark.parametrize("name", [n for n in CASTABLE if n not in {"e8m0", "fp32"}])
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


@pytest.mark.skipif(not E8M0, reason="this torch has no float8_e8m0fnu")
def test_e8m0_has_no_zero_and_no_sign():
    fmt = FORMATS["e8m0"]
    cast = torch.tensor([0.0, -0.0, 2.0**-149, -3.0, 1.5, 1.49, 2.0**127 * 1.49]).to(torch.float8_e8m0fnu).double()
    assert cast.tolist() == [2.0**-127, 2.0**-127, 2.0**-127, 4.0, 2.0, 1.0, 2.0**127]
    assert torch.tensor([1.5 * 2.0**127]).to(torch.float8_e8m0fnu).isnan().all()
    ours = round_to(np.array([0.0, 2.0**-149, 3.0, 1.5, 1.49, 2.0**127 * 1.49, fmt.overflow_at]), fmt)
    assert ours[:-1].tolist() == [2.0**-127, 2.0**-127, 4.0, 2.0, 1.0, 2.0**127]
    assert math.isnan(ours[-1])


def test_e2m1_has_these_values():
    fmt = FORMATS["e2m1"]
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert round_to(values, fmt).tolist() == values.tolist()
    between = (values[1:] + values[:-1]) / 2
    ties_to_even_code = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert round_to(between, fmt).tolist() == ties_to_even_code
    assert round_to(np.nextafter(between, 0), fmt).tolist() == values[:-1].tolist()
    assert round_to(np.nextafter(between, 9), fmt).tolist() == values[1:].tolist()
    assert round_to(np.array([7.0, 1e30]), fmt).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("name", [n for n in CASTABLE if n != "fp32"])
@given(st.data())
def test_rounding_is_torchs_cast(name, data):
    patterns = data.draw(st.lists(st.integers(0, 0x7F7FFFFF), min_size=1))
    values = from_patterns(patterns, torch.float32)
    if name == "e8m0":  # torch's cast rounds up all of the lowest binade, ours to nearest
        values = values[(values <= 2.0**-127) | (values >= 2.0**-126)]
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
