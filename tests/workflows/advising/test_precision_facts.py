from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from ampdoctor.diagnosis.replay.precision import advise_precision
from ampdoctor.evidence.run_facts import Place
from ampdoctor.evidence.targets import TARGETS
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.numerics.counting import count
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.ranges.profile import Collector, RunFacts
from ampdoctor.replay.session import Session
from ampdoctor.scaling.choose import choose_scale
from ampdoctor.workflows.advice import fp16_of, precision_facts
from ampdoctor.workflows.measure import measure

SPEC = importlib.util.spec_from_file_location(
    "attention_runs", Path(__file__).parents[2] / "probes" / "attention_runs.py"
)
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)


def advice_for(run, target="a100", *, pure=False):
    """Everything measured for real."""
    session = Session(run, device=torch.device("cpu"))
    with autocast_policy("cuda"):
        assert session.has_step(0)
        profile = measure(session, session.snapshot(), 3).ranges
    facts = facts_of(profile, target, pure=pure)
    return facts, advise_precision(facts)


def facts_of(profile, target="a100", **more):
    return precision_facts(profile, TARGETS[target], choice=choose_scale(profile, DEFAULT_THRESHOLDS), **more)


def site(name, kind, values, *, half=True):
    return Place(name, kind, "parameter" if kind.startswith("weight") else "output"), values, half


def measured(*sites, **facts):
    collector = Collector()
    collector.add_step({place: count(values) for place, values, _ in sites})
    half = {place: half for place, _, half in sites}
    return collector.profile(RunFacts(precision="fp16", **facts), half=half.__getitem__, weight=lambda _: 10)


def test_a_healthy_transformer_keeps_fp16_and_is_told_what_autocast_keeps_wide():
    facts, advice = advice_for(runs.transformer(fused=True))
    assert advice.precision == "fp16"
    assert advice.alternative == "bf16"
    assert facts.fp16_error < 2e-3 < facts.bf16_error < 8e-3
    parts = {(row.module, row.part): row.precision for row in advice.rows}
    assert parts["norm", "layer_norm"] == "fp32"
    assert parts["attn.qkv", ""] == "fp16"
    assert parts["rms", ""] == "fp32"  # written out, and its mean is taken in fp16
    assert ("attn", "scaled_dot_product_attention") in parts


def test_pure_bf16_that_stands_still_gets_the_remedies_and_autocast_keeps_its_updates():
    _, sick = advice_for(runs.transformer(pure=True, precision="bf16", lr=1e-5), pure=True)
    assert sick.precision == "bf16"
    assert any("stochastically" in remedy for remedy in sick.remedies)
    _, healthy = advice_for(runs.transformer(precision="bf16", lr=3e-3))
    assert not any("update" in said for said in (*healthy.remedies, *healthy.notes))


def test_forward_magnitudes_leave_masks_and_wide_tensors_aside():
    found = facts_of(
        measured(
            site("a", "activation", torch.tensor([1.0, 300.0])),
            site("b", "activation", torch.tensor([1.0, 3.0e38])),
            site("c", "activation", torch.tensor([1.0, 7e4]), half=False),
            site("a.weight", "weight_grad", torch.randn(1000)),
        )
    )
    assert found.forward == {"a": 300.0}


def test_a_spread_reaches_from_the_largest_value_to_the_one_that_may_be_lost():
    for rare, span in ((5, 6.0), (20, 26.0)):  # of 1,000: a hundredth may be lost
        values = torch.cat([torch.ones(1000 - rare), torch.full((rare,), 2.0**-20), torch.full((1,), 2.0**6)])
        sites = (site("a.weight", "weight", values), site("a.weight", "weight_grad", torch.randn(100)))
        (found,) = facts_of(measured(*sites), "h100").spreads
        assert found.log2_span == pytest.approx(span, abs=0.13)
        assert (found.module, found.kind) == ("a", "weight")


def test_hardware_without_subnormals_loses_what_lies_between_2_to_the_minus_25_and_minus_14():
    values = torch.tensor([2.0**-26, 2.0**-24, 2.0**-15, 1.5 * 2.0**-14, 1.0])
    both = [
        facts_of(
            measured(site("a", "activation", values), site("a.weight", "weight_grad", torch.randn(100))), name
        ).forward_flushed
        for name in ("a100", "mi200")
    ]
    assert both == pytest.approx([0.2, 0.6])
    assert fp16_of(TARGETS["mi200"]).flush_at == math.nextafter(2.0**-14, 0)


def test_errors_are_those_of_the_best_scale_wherever_the_measured_gradients_carry_one():
    gradients = torch.randn(4000) * 2.0**-20
    plain = facts_of(measured(site("a.weight", "weight_grad", gradients)))
    scaled = facts_of(measured(site("a.weight", "weight_grad", gradients * 64.0), base_scale=64.0))
    assert plain.scale == scaled.scale
    assert plain.fp16_error == pytest.approx(scaled.fp16_error)
    assert plain.fp16_error == pytest.approx(3.5 * 2e-4, rel=0.2)
    assert plain.bf16_error == pytest.approx(3.5 * 1.6e-3, rel=0.2)
