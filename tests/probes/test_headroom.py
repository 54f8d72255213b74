"""The tightest headroom of a step: reduced formats only, and no mask."""

from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.probes.nonfinite import Tightest

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LOWEST = torch.finfo(HALF).min


def found(*seen):
    tightest = Tightest(3)
    for kind, name, dtype, low, high in seen:
        tightest.note(kind, name, dtype, low, high)
    return tightest.found


@pytest.mark.parametrize(
    ("low", "high", "amax"),
    [
        (-8.0, 2.0, 8.0),
        (-math.inf, 2.0, 2.0),
        (LOWEST, 2.0, 2.0),
        (LOWEST + 32, 2.0, 65472.0),
        (-8.0, math.inf, None),
        (math.nan, math.nan, None),
        (0.0, 0.0, None),
        (LOWEST, 0.0, None),
    ],
)
def test_an_output_counts_by_its_magnitude_and_a_mask_does_not(low, high, amax):
    headroom = found(("output", "net.fc", HALF, low, high))
    assert (headroom and headroom.amax) == amax
    if headroom is not None:
        assert headroom.log2 == math.log2(65504 / amax)


def test_a_parameters_gradient_has_the_format_of_its_modules_output():
    seen = [("output", "fc", HALF, -1.0, 1.0), ("output", "norm", FULL, -9e4, 9e4)]
    headroom = found(*seen, ("grad", "fc.weight", FULL, -3e4, 0.0), ("grad", "norm.weight", FULL, 0.0, 5e4))
    assert (headroom.module, headroom.kind, headroom.format, headroom.step) == ("fc", "grad", "fp16", 3)
    assert found(*seen, ("grad", "fc.weight", FULL, 0.0, 1e5)).amax == 1.0, "a sum of several, made in fp32"


def test_formats_are_compared_by_what_is_left_of_each():
    headroom = found(("output", "a", BRAIN, -1e30, 0.0), ("output_grad", "b", HALF, 0.0, 100.0))
    assert (headroom.module, headroom.format) == ("b", "fp16")


@pytest.mark.parametrize("kind", ["loss", "param", "buffer", "optimizer_state"])
def test_state_is_stored_and_not_computed(kind):
    assert found((kind, "x", HALF, 0.0, 6e4)) is None
