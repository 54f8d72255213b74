from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from ampdoctor.numerics import tensors
from ampdoctor.probes import ranges
from ampdoctor.probes.ranges import UpdateProbe
from ampdoctor.replay.session import Session
from tests.probes.traced import stepped

SPEC = importlib.util.spec_from_file_location("attention_runs", Path(__file__).parent / "attention_runs.py")
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)


def looked_at(run, steps, wanted):
    session = Session(run, device=torch.device("cpu"))
    probe = UpdateProbe(wanted)
    with session.reference():
        stepped(session, probe, steps=steps)
    return {facts.name: facts for facts in probe.facts()}


def by_hand(run):
    """Weights before and after the first fp32 step of the same run."""
    model = run.model.float()
    optimizer = run.optimizer(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.loss(model, next(iter(run.batches))).backward()
    optimizer.step()
    return before, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("block", "sampled"), [(100, 1 << 20), (1 << 20, 1 << 20), (100, 1 << 10)])
def test_the_figures_are_those_of_the_step_taken_by_hand(monkeypatch, block, sampled):
    monkeypatch.setattr(tensors, "BLOCK", block)
    monkeypatch.setattr(ranges, "SAMPLED", sampled)
    found = looked_at(runs.transformer(lr=1e-4), 1, {0})
    before, after = by_hand(runs.transformer(lr=1e-4))
    assert found.keys() == before.keys()
    for name, facts in found.items():
        delta = after[name] - before[name]
        kept = before[name].bfloat16()
        moved = (kept.float() + delta).bfloat16()
        changed = delta != 0
        assert facts.elements == delta.numel()
        assert facts.updated == pytest.approx(changed.float().mean().item())
        assert facts.stagnant == pytest.approx((moved == kept)[changed].float().mean().item())
        assert facts.lost == pytest.approx(((moved.float() - kept.float() - delta).norm() / delta.norm()).item())
        both = changed & (before[name] != 0)
        if bool(both.any()):
            ratio = (delta / before[name])[both].abs().log2().median().item()
            assert facts.log2_ratio == pytest.approx(ratio, abs=0.25)


def test_what_is_foreseen_happens_to_a_run_in_pure_bf16():
    """SGD's update is one operation, so that each element that is said to stay does stay, and no other."""
    found = looked_at(runs.transformer(pure=True, precision="bf16", lr=1e-3, optimizer=torch.optim.SGD), 1, {0})
    run = runs.transformer(pure=True, precision="bf16", lr=1e-3, optimizer=torch.optim.SGD)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    optimizer = run.optimizer(run.model)
    run.loss(run.model, next(iter(run.batches))).backward()
    optimizer.step()
    gradients = {name: p.grad for name, p in run.model.named_parameters()}
    stay = sum(int(((p == before[name]) & (gradients[name] != 0)).sum()) for name, p in run.model.named_parameters())
    foreseen = sum(f.elements * f.updated * f.stagnant for f in found.values())
    assert stay > 1000
    assert foreseen == pytest.approx(stay, rel=0.02)


def test_an_update_that_is_not_finite_is_left_out():
    tally = ranges._Tally("torch.optim.sgd.SGD")
    tally.add(torch.ones(4), torch.tensor([1.0, 2.0, math.inf, math.nan]))
    facts = tally.facts("w")
    assert (facts.elements, facts.updated, facts.size, facts.lost) == (2, 0.5, 1.0, 0.0)
