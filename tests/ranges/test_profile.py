from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.ranges.profile import FP8, figures, fitted_figures
from ampdoctor.scaling.choose import choose_scale
from ampdoctor.scaling.scalers import ScalerSettings
from ampdoctor.scaling.search import predict
from ampdoctor.workflows.profile import profile_section
from tests.ranges.known import collected, place, values

A, B, NORM = place("a"), place("b"), place("norm")
WA, WB = place("a.weight", "weight_grad"), place("b.weight", "weight_grad")
OUT, WEIGHT = place("a", "activation"), place("a.weight", "weight")


def tensors(seed=0, *, factor=1.0):
    """One step; the gradients multiplied."""
    return {
        A: values(-24, seed=seed, zeros=500) * factor,
        B: values(-18, seed=seed + 1) * factor,
        NORM: values(-28, seed=seed + 2) * factor,
        WA: values(-20, seed=seed + 3) * factor,
        WB: values(-10, seed=seed + 4) * factor,
        OUT: values(1, seed=seed + 5),
    }


def known(*seeds, factor=1.0, **options):
    steps = [tensors(seed, factor=factor) for seed in seeds or (0, 10)]
    return collected(steps, weights={WEIGHT: values(-4, seed=99)}, wide=("norm",), **options)


def test_kinds_are_apart_and_what_is_not_half_counts_nowhere():
    profile = known()
    names = {
        kind: [profile.sites[i].place.name for i in profile.of_kind(kind)]
        for kind in ("activation_grad", "weight_grad")
    }
    assert names == {"activation_grad": ["a", "b"], "weight_grad": ["a.weight", "b.weight"]}
    assert [profile.sites[i].place for i in profile.half_gradients()] == [A, B, WA, WB]
    assert [profile.sites[i].place for i in profile.half_gradients(without=["a"])] == [B, WB]
    both = torch.cat([tensors(seed)[where] for seed in (0, 10) for where in (A, B)])
    assert profile.merged("activation_grad") == count(both)
    assert profile.merged("activation_grad", without=["a", "b"]) == Histogram.empty()


@pytest.mark.parametrize("scale", [2.0**-6, 2.0**10])
def test_figures_of_a_kind_are_those_of_all_its_values(scale):
    profile = known()
    for kind, places in (("activation_grad", (A, B)), ("weight_grad", (WA, WB))):
        every = torch.cat([tensors(seed)[where] for seed in (0, 10) for where in places]).double()
        nonzero = every[every != 0] * scale
        found = figures(profile.merged(kind), "fp16", profile.factor(kind, scale))
        cast = nonzero.half().double()
        assert found.flushed == pytest.approx((cast == 0).double().mean().item(), abs=1e-12)
        small = (nonzero.abs() > 2.0**-25) & (nonzero.abs() < 2.0**-14)
        assert found.subnormal == pytest.approx(small.double().mean().item(), abs=1e-6)  # but for one at the edge
        assert found.relative_error == pytest.approx(((cast - nonzero).norm() / nonzero.norm()).item(), rel=0.05)
        assert found.zeros == (every == 0).double().mean().item()
        assert found.overflowed == 0.0


def test_what_overflows_is_a_share_of_the_nonzero():
    large = torch.tensor([0.0, 1.0, 20000.0, 30000.0, 70000.0, 1e6, -1e6, math.inf])
    found = figures(collected([{A: large}]).merged("activation_grad"), "fp16", 1.0)
    assert found.overflowed == pytest.approx(3 / 6)
    assert found.relative_error == math.inf
    assert figures(count(large), "fp16", 2.0**-6).overflowed == 0.0


@pytest.mark.parametrize("fmt", FP8)
def test_fitted_figures_are_shares_of_the_sites_that_are_asked_for(fmt):
    profile = known()
    one, two = (fitted_figures(profile, [i], fmt) for i in profile.of_kind("activation_grad"))
    both = fitted_figures(profile, profile.of_kind("activation_grad"), fmt)
    nonzero = [int(profile.histograms[i].counts.sum()) for i in profile.of_kind("activation_grad")]
    for name in ("flushed", "subnormal"):
        parts = getattr(one, name), getattr(two, name)
        assert getattr(both, name) == pytest.approx(np.average(parts, weights=nonzero).item())
    assert (one.zeros, two.zeros, both.zeros) == (0.25, 0.0, 0.125)
    assert both.overflowed == 0.0
    assert both.relative_error == pytest.approx(two.relative_error, rel=0.01)  # 64 times as large: it decides
    assert fitted_figures(profile, [], fmt) == fitted_figures(collected([{A: torch.zeros(0)}]), [0], fmt)


@pytest.mark.parametrize("base", [2.0**10, 1000.0])
def test_a_scale_made_by_hand_is_divided_out_everywhere(base):
    plain = known()
    scaled = known(factor=base, base_scale=base, loss_scale=base)
    exact = math.frexp(base)[0] == 0.5
    near = {"rel": 1e-5} if exact else {"rel": 0.05, "abs": 0.01}

    for kind in ("activation_grad", "weight_grad"):
        for scale in (1.0, 2.0**6, 2.0**12):
            a, b = (figures(p.merged(kind), "fp16", p.factor(kind, scale)) for p in (plain, scaled))
            assert (b.flushed, b.subnormal) == pytest.approx((a.flushed, a.subnormal), **near)
            assert b.relative_error == pytest.approx(a.relative_error, **near)
    assert choose_scale(scaled, DEFAULT_THRESHOLDS) == choose_scale(plain, DEFAULT_THRESHOLDS)
    for settings in (ScalerSettings(scale=2.0**8), ScalerSettings(scale=2.0**30)):
        a, b = (predict(p, settings) for p in (plain, scaled))
        assert (b.skipped, b.scale) == (a.skipped, a.scale)
        shares = [(p.activation_flushed, p.weight_flushed, p.relative_error) for p in (a, b)]
        assert shares[1] == pytest.approx(shares[0], **near)

    (one, two) = (profile_section(p, 2.0**8)["sites"] for p in (plain, scaled))
    for a, b in zip(one, two, strict=True):
        assert b["amax"] == pytest.approx(a["amax"], rel=1e-6)


def test_log2_series_leaves_out_steps_without_a_finite_nonzero_value():
    steps = [{WA: t} for t in (torch.zeros(2), torch.tensor([math.inf]), torch.tensor([4.0]), torch.tensor([0.25]))]
    assert collected(steps, base_scale=2.0).log2_series(0) == [1.0, -3.0]
