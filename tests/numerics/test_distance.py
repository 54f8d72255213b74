"""Distances of tensors, block by block, against the plain formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.numerics.tensors import BLOCK, Distance


def plainly(got, reference):
    one, other = got.double(), reference.double()
    flushed = (one == 0) & (other != 0)
    return Distance(
        error=float((one - other).square().sum()),
        norm=float(one.square().sum()),
        reference=float(other.square().sum()),
        flushed_error=float(other[flushed].square().sum()),
        flushed=int(flushed.sum()),
        nonzero=int((other != 0).sum()),
    )


def measured(got, reference):
    distance = Distance()
    distance.add(got, reference)
    return distance


@pytest.mark.parametrize("size", [0, 7, 3 * BLOCK + 5])
@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**-140, 2.0**63])
def test_sums_are_those_of_float64(size, scale):
    torch.manual_seed(0)
    reference = torch.randn(size) * scale
    got = torch.where(torch.rand(size) < 0.2, 0.0, reference * (1 + torch.randn(size) / 100))
    ours, plain = measured(got, reference), plainly(got, reference)
    assert (ours.flushed, ours.nonzero) == (plain.flushed, plain.nonzero)
    for name in ("error", "norm", "reference", "flushed_error"):
        assert math.isclose(getattr(ours, name), getattr(plain, name), rel_tol=1e-5, abs_tol=0.0)
    assert math.isclose(ours.relative, math.sqrt(plain.error / plain.reference) if size else 0.0, rel_tol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_any_format_beside_fp32_in_any_layout(dtype):
    torch.manual_seed(0)
    reference = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    got = torch.randn(4, 2, 6, 6).transpose(0, 1).to(dtype)
    ours, plain = measured(got, reference), plainly(got, reference)
    assert math.isclose(ours.error, plain.error, rel_tol=1e-5)
    assert math.isclose(ours.norm, plain.norm, rel_tol=1e-5)


def test_a_missing_tensor_counts_as_zeros():
    reference = torch.tensor([0.0, 3.0, 4.0])
    assert measured(None, reference) == plainly(torch.zeros(3), reference)
    assert measured(None, reference).relative == 1.0


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_far(spoilt):
    sound = torch.ones(5)
    bad = torch.tensor([1.0, spoilt, 1.0, 1.0, 1.0])
    assert measured(bad, sound).relative == math.inf
    assert measured(sound, bad).relative == math.inf


def test_nothing_beside_nothing_is_near_and_something_beside_nothing_far():
    assert measured(torch.zeros(3), torch.zeros(3)).relative == 0.0
    assert measured(torch.ones(3), torch.zeros(3)).relative == math.inf
    assert Distance().relative == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_was_got_is_divided_by_its_scale_in_the_references_format(dtype):
    torch.manual_seed(0)
    reference = torch.randn(3 * BLOCK + 5) * 2.0**-20
    got = (reference * 2.0**16).to(dtype)
    ours = Distance()
    ours.add(got, reference, scale=2.0**16)
    assert math.isclose(ours.error, plainly(got.double() / 2.0**16, reference).error, rel_tol=1e-5)
    assert ours.relative < (1e-3 if dtype is torch.float16 else 1e-12)


def test_flushed_elements_below_a_threshold_are_counted_apart():
    reference = torch.tensor([0.0, 2.0**-25, -(2.0**-24), 2.0**-24 * 1.5, 1.0, 2.0**-25])
    got = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 2.0**-25])
    ours = Distance(least=2.0**-24)
    ours.add(got, reference)
    assert (ours.flushed, ours.below, ours.nonzero) == (4, 1, 5)
