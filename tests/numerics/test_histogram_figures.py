from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ampdoctor.errors import UsageError
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.formats import FORMATS, FloatFormat, round_to
from tests.numerics.data import CASTABLE, DTYPES, POWERS, finite_magnitudes, tensors

any_tensor = st.sampled_from(DTYPES).flatmap(tensors)
any_format = st.sampled_from(list(FORMATS.values()))
power = st.sampled_from(POWERS).map(lambda s: 2.0**s)


def lognormal(location: float, spread: float, dtype: torch.dtype = torch.float32, n: int = 40_000) -> torch.Tensor:
    """Magnitudes with this mean and standard deviation in binades: smooth data as gradients are."""
    generator = torch.Generator().manual_seed(int(location * 7 + spread * 1000) & 0xFFFF)
    exponents = torch.randn(n, generator=generator, dtype=torch.float64) * spread + location
    signs = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return (torch.exp2(exponents) * signs).to(dtype)


def true_flushed(magnitudes: np.ndarray, fmt: FloatFormat, scale: float) -> float:
    return float((magnitudes * scale <= fmt.flush_at).mean()) if magnitudes.size else 0.0


def true_error(magnitudes: np.ndarray, fmt: FloatFormat, scale: float) -> float:
    scaled = magnitudes * scale
    return float(np.linalg.norm(round_to(scaled, fmt) - scaled) / np.linalg.norm(scaled))


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [n for n in CASTABLE if n != "bf16"])
def test_flushed_is_what_a_real_cast_turns_to_zero(name, source):
    data = lognormal(-18.0, 6.0, source)
    nonzero = data[data != 0]
    histogram = count(data)
    for exponent in range(-20, 31, 5):
        scaled = nonzero.float() * 2.0**exponent
        assert (scaled.double() == nonzero.double() * 2.0**exponent).all()  # the product itself is exact
        flushed = (scaled.to(CASTABLE[name]).double() == 0).double().mean().item()
        assert histogram.flushed(name, 2.0**exponent) == pytest.approx(flushed, abs=1e-12)


@given(any_tensor, any_format, st.one_of(power, st.floats(1e-6, 1e9)))
def test_zero_and_nonzero_fractions_are_never_confused(tensor, fmt, scale):
    histogram, magnitudes = count(tensor), finite_magnitudes(tensor)
    with np.errstate(over="ignore", under="ignore"):
        scaled = magnitudes * scale
    overflowed = bool((scaled >= fmt.overflow_at).any())
    assert (histogram.overflowed(fmt, scale) > 0) == overflowed
    at = fmt.flush_at / scale
    assert (histogram.flushed(fmt, scale) > 0) == bool((magnitudes <= at).any())
    for fraction in (histogram.flushed(fmt, scale), histogram.subnormal(fmt, scale), histogram.overflowed(fmt, scale)):
        assert 0.0 <= fraction <= 1.0
    total = sum(f(fmt, scale) for f in (histogram.flushed, histogram.subnormal, histogram.overflowed))
    assert total <= 1.0 + 1e-9
    if magnitudes.size and overflowed and fmt.overflow_result != "saturate":
        assert histogram.relative_error(fmt, scale) == math.inf
    else:
        assert 0.0 <= histogram.relative_error(fmt, scale) < math.inf


@given(any_tensor, any_format, st.one_of(power, st.floats(1e-6, 1e9)))
def test_the_extremes_enter_every_figure_as_themselves(tensor, fmt, scale):
    magnitudes = finite_magnitudes(tensor)
    assume(magnitudes.size > 0)
    magnitudes = np.array([magnitudes.min(), magnitudes.max()])
    with np.errstate(over="ignore", under="ignore"):
        scaled = magnitudes * scale
    assume(scaled.max() < 1e150)
    assume(not np.isclose(scaled, fmt.overflow_at, rtol=1e-14).any())
    assume(not np.isclose(scaled, fmt.min_normal, rtol=1e-14).any())
    histogram = count(torch.from_numpy(magnitudes.copy()))
    assert histogram.overflowed(fmt, scale) == pytest.approx((scaled >= fmt.overflow_at).mean())
    if not np.isclose(scaled, fmt.flush_at, rtol=1e-14).any():
        inside = (scaled > fmt.flush_at) & (scaled < fmt.min_normal)
        assert histogram.subnormal(fmt, scale) == pytest.approx(inside.mean())
    if not (scaled >= fmt.overflow_at).any() and scaled.max() > 1e-100:
        error = true_error(magnitudes, fmt, scale)
        assert histogram.relative_error(fmt, scale) == pytest.approx(error, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "fp32"])
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**-3, 1.0, 3.0, 1000.0, 2.0**16, 2.0**30])
def test_error_is_within_four_percent_in_the_normal_range(name, scale):
    fmt = FORMATS[name]
    low, high = math.log2(fmt.min_normal), math.log2(fmt.max)
    # Narrow enough that the norm is not one of a handful of elements, whose own rounding errors are chance.
    spread = min((high - low) / 6, 1.0)
    data = lognormal((low + high) / 2 - math.log2(scale), spread)
    data = data[(data.abs() * scale > fmt.min_normal * 2) & (data.abs() * scale < fmt.max / 2)]
    histogram = count(data)
    assert histogram.subnormal(fmt, scale) == histogram.flushed(fmt, scale) == histogram.overflowed(fmt, scale) == 0.0
    expected = true_error(finite_magnitudes(data), fmt, scale)
    assert histogram.relative_error(fmt, scale) == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("name", ["fp16", "e4m3fn", "e5m2"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [-3.0, -1.0, 0.0, 1.0, 2.5, 5.0])
def test_figures_around_the_flush_threshold_are_within_ten_percent(name, source, offset):
    fmt = FORMATS[name]
    scale = 2.0**-4 if source == torch.float16 else 2.0**7
    data = lognormal(math.log2(fmt.flush_at / scale) + offset, 1.5, source)
    magnitudes = finite_magnitudes(data)
    histogram = count(data)
    scaled = magnitudes * scale
    if (scaled < fmt.overflow_at).all():
        expected = true_error(magnitudes, fmt, scale)
        assert histogram.relative_error(fmt, scale) == pytest.approx(expected, rel=0.1)
    subnormal = ((scaled > fmt.flush_at) & (scaled < fmt.min_normal)).mean()
    assert histogram.subnormal(fmt, scale) == pytest.approx(subnormal, rel=0.1, abs=2e-4)
    assert histogram.flushed(fmt, scale) == pytest.approx(true_flushed(magnitudes, fmt, scale), abs=1e-12)
    odd = scale * 1.3
    assert histogram.flushed(fmt, odd) == pytest.approx(true_flushed(magnitudes, fmt, odd), rel=0.1, abs=5e-4)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "fp32"])
def test_overflowed_is_within_ten_percent(name):
    fmt = FORMATS[name]
    data = lognormal(math.log2(fmt.max) - 6.0, 3.0, torch.float64)
    magnitudes = finite_magnitudes(data)
    histogram = count(data)
    for scale in (2.0**3, 2.0**5, 2.0**6, 100.0):
        expected = (magnitudes * scale >= fmt.overflow_at).mean()
        assert histogram.overflowed(fmt, scale) == pytest.approx(expected, rel=0.1, abs=5e-4)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].overflow_result == "saturate"])
def test_saturation_costs_the_distance_to_max(name):
    fmt = FORMATS[name]
    data = lognormal(math.log2(fmt.max), 1.0)
    expected = true_error(finite_magnitudes(data), fmt, 1.0)
    assert expected > 0.1
    assert count(data).relative_error(fmt) == pytest.approx(expected, rel=0.04)


def test_a_finer_target_loses_nothing():
    weights = lognormal(-6.0, 2.0, torch.bfloat16)
    weights = weights[weights.abs() >= 2.0**-13]
    for scale in (1.0, 2.0**10, 2.0**-1):
        assert count(weights).relative_error("fp16", scale) == 0.0
    for source, target in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        data = lognormal(-16.0, 3.0, source)  # float16's subnormals are on float16's own grid
        assert count(data).relative_error(target) == 0.0
        assert count(data).relative_error(target, 4.0) == 0.0
    assert count(weights).relative_error("fp16", 3.0) == 0.0  # 10 bits fit into 11
    assert count(weights).relative_error("fp16", 1.0 / 3.0) > 1e-5


@given(st.floats(-30, 30), st.floats(0.1, 6.0), st.floats(0.001, 0.999))
def test_quantiles_are_within_a_bin(location, spread, q):
    data = lognormal(location, spread, n=2000)
    exact = np.quantile(finite_magnitudes(data), q, method="inverted_cdf")
    found = count(data).quantile(q)
    assert 1 / 1.1251 <= found / exact <= 1.1251
    assert count(data).quantile(0.0) == finite_magnitudes(data).min()
    assert count(data).quantile(1.0) == finite_magnitudes(data).max()


def test_headroom_counts_binades_to_max():
    histogram = count(torch.tensor([1.0, -4.0, 0.0, math.inf]))
    assert histogram.headroom("fp16") == pytest.approx(math.log2(65504 / 4))
    assert histogram.headroom("fp16", 2.0**16) == pytest.approx(math.log2(65504 / 4) - 16)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_what_is_no_scale_and_no_share_is_refused(scale):
    ones = count(torch.ones(2))
    for figure in (ones.flushed, ones.subnormal, ones.overflowed, ones.relative_error, ones.headroom):
        with pytest.raises(UsageError, match="a scale is a positive finite number"):
            figure("fp16", scale)
    with pytest.raises(UsageError, match="a scale is a positive finite number"):
        ones.scaled(scale)
    with pytest.raises(UsageError, match="a quantile lies between 0 and 1"):
        ones.quantile(1.5)


def test_the_last_quantile_of_the_largest_number_is_that_number():
    largest = torch.finfo(torch.float32).max
    assert count(torch.tensor([1.0, largest])).quantile(1.0) == largest
    assert count(torch.tensor([largest, largest * 0.999])).quantile(0.999999) > 2.0**127.9
