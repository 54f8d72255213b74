from __future__ import annotations

import gc
import importlib.util
import math
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.errors import UserCodeError
from ampdoctor.evidence.run_facts import Site
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.probes import ranges
from ampdoctor.probes.formats_seen import FormatsProbe
from ampdoctor.probes.gradients import GradientProbe
from ampdoctor.probes.ranges import RangeProbe, ReferenceGradients, ZeroedProbe
from ampdoctor.ranges.profile import RunFacts
from ampdoctor.replay.session import Session
from tests.probes.traced import stepped

SPEC = importlib.util.spec_from_file_location(
    "ranges_runs", Path(__file__).parents[1] / "workflows" / "measuring" / "ranges_runs.py"
)
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)


class Seen(NamedTuple):
    site: Site
    histogram: Histogram
    amax: tuple


def session_of(run):
    return Session(run, device=torch.device("cpu"))


def measured(session, steps, plan=None):
    probe = RangeProbe(plan)
    with session.reference():
        stepped(session, probe, steps=steps)
    profile = probe.profile(RunFacts(precision="fp16"))
    found = {}
    for index, (site, histogram) in enumerate(zip(profile.sites, profile.histograms, strict=True)):
        amax = tuple(profile.series.amax[:, index].tolist())
        found[site.place.name, site.kind, site.place.part] = Seen(site, histogram, amax)
    return probe, found


def by_hand(run, steps):
    """Gradients of the same fp32 run in a loop of its own: of parameters, of the up projection's two outputs."""
    model, optimizer = run.model, run.optimizer(run.model)
    outputs, weights, activations = [], {}, []
    model.block.up.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    for batch in list(run.batches)[:steps]:
        outputs.clear()
        optimizer.zero_grad(set_to_none=True)
        loss = run.loss(model, batch)
        parameters = [p for p in model.parameters() if p.requires_grad and p is not model.unused]
        names = {id(p): n for n, p in model.named_parameters()}
        found = torch.autograd.grad(loss, [*outputs, *parameters], retain_graph=True)
        activations += found[: len(outputs)]
        for p, g in zip(parameters, found[len(outputs) :], strict=True):
            weights.setdefault(names[id(p)], []).append(g)
            p.grad = g
        optimizer.step()
    return weights, activations


def histogram(parts):
    total = Histogram.empty()
    for part in parts:
        total = total + count(part)
    return total


def test_gradients_are_those_of_the_fp32_run():
    probe, sites = measured(session_of(runs.tied()), 3)
    weights, _ = by_hand(runs.tied(), 3)
    assert {name for name, kind, _ in sites if kind == "weight_grad"} == weights.keys()
    for name, grads in weights.items():
        site = sites[name, "weight_grad", "parameter"]
        assert site.histogram == histogram(grads), name
        assert site.amax == tuple(g.abs().max().item() for g in grads)
    assert probe.hand_scales == [1.0, 1.0, 1.0]


def test_a_module_called_twice_is_one_site_with_both_gradients():
    run = runs.tied()
    run.model.block.act = nn.ReLU()  # so that the loop by hand can see the output before it is overwritten
    other = runs.tied()
    other.model.block.act = nn.ReLU()
    _, sites = measured(session_of(run), 2)
    _, activations = by_hand(other, 2)
    site = sites["block.up", "activation_grad", "output"]
    assert site.histogram == histogram(activations)
    assert site.histogram.numel == 2 * 2 * 4 * 7 * 32


def test_an_in_place_activation_has_its_own_gradient_and_leaves_its_inputs():
    def run(*, inplace, dims):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 1))
        batch = torch.randn(*dims, 4, generator=torch.Generator().manual_seed(2))
        return TrainingRun(
            model=model, batches=[batch], loss=lambda m, b: m(b).square().mean(), precision="fp16", optimizer=runs.sgd
        )

    for dims in ((5,), (2, 5)):
        _, inplace = measured(session_of(run(inplace=True, dims=dims)), 1)
        _, apart = measured(session_of(run(inplace=False, dims=dims)), 1)
        key = ("1", "activation_grad", "output")
        assert inplace[key].histogram == apart[key].histogram
        missing = {key for key in apart if key[1] == "activation_grad"} - inplace.keys()
        view = nn.Linear(4, 8)(torch.ones(*dims, 4))._is_view()  # of more than two dimensions, up to torch 2.13
        assert missing == ({("0", "activation_grad", "output")} if view else set())


def test_sparse_gradients_and_what_never_gets_one():
    _, sites = measured(session_of(runs.tied(sparse=True)), 2)
    sparse = sites["tok.weight", "weight_grad", "parameter"].histogram
    assert sparse.numel == 2 * 20 * 16
    assert sparse.zeros > 0
    assert not any(name.startswith(("frozen.", "unused")) and kind == "weight_grad" for name, kind, _ in sites)
    assert ("frozen.weight", "weight", "parameter") in sites


def hooks_of(model):
    dicts = []
    for module in model.modules():
        dicts += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    dicts += [p._backward_hooks or {} for p in model.parameters()]
    return sum(len(d) for d in dicts)


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_outlives_the_replay(fails):
    def loss(model, batch):
        if fails:
            raise ValueError("mine")
        return runs.cross_entropy(model, batch)

    run = runs.tied()
    run.loss = loss
    session = session_of(run)
    for probe in (RangeProbe(), FormatsProbe(), ReferenceGradients(None)):
        expected = pytest.raises(UserCodeError, match="mine") if fails else nullcontext()
        with expected:
            stepped(session, probe)
        assert hooks_of(session.model) == 0


def test_a_probed_step_is_the_same_step():
    plain, probed = session_of(runs.tied()), session_of(runs.tied())
    expected, outcomes = stepped(plain, steps=2), stepped(probed, RangeProbe(), steps=2)
    assert [outcome.loss for outcome in outcomes] == [outcome.loss for outcome in expected]
    for a, b in zip(plain.model.parameters(), probed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("policy", "norm_is_half"), [("cuda", False), ("native", True)])
def test_the_plan_follows_the_policy(policy, norm_is_half):
    probe = FormatsProbe()
    with autocast_policy(policy):
        stepped(session_of(runs.tied()), probe)
    plan = probe.plan
    assert {"block.up", "block.act", "block.down", "head", "frozen"} <= plan.outputs
    assert ("block.norm" in plan.outputs) is norm_is_half or norm_is_half  # layer_norm of an fp32 input stays fp32
    assert "tok" not in plan.outputs
    assert {"block.up.weight", "block.up.bias", "tok.weight"} <= plan.parameters  # tok.weight: tied to the head
    assert not any(name.startswith("norm") for name in plan.parameters)
    assert "head" in plan.inputs or norm_is_half
    assert not probe.loss_in_half


def test_an_input_gradient_is_only_what_flows_through_that_module():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            y = self.norm(x)
            return self.a(y) + 1000.0 * self.b(y)

    torch.manual_seed(0)
    batch = torch.randn(3, 4)
    run = TrainingRun(
        model=Shared(),
        batches=[batch],
        loss=lambda m, b: m(b).float().sum(),
        precision="fp16",
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )
    session = session_of(run)
    start, halves = session.snapshot(), FormatsProbe()
    with autocast_policy("cuda"):
        stepped(session, halves)
    start.restore()
    assert halves.plan.inputs == {"a", "b"}
    _, sites = measured(session, 1, halves.plan)
    start.restore()
    expected = run.model.a.weight.detach().sum(0).abs().max().item()
    assert sites["a", "activation_grad", "input"].amax[0] == pytest.approx(expected, rel=1e-5)
    assert sites["a", "activation_grad", "input"].site.half
    assert not sites["norm", "activation_grad", "output"].site.half


def compared(session):
    reference = ReferenceGradients(None)
    ranges = ZeroedProbe(reference)
    start = session.snapshot()
    with session.reference():
        stepped(session, reference)
    start.restore()
    stepped(session, ranges)
    return ranges.zeroed


def by_kind(counts, kind):
    return sum(count for place, count in counts.items() if place.kind == kind)


def test_zeroed_counts_what_is_lost_and_not_what_was_zero():
    fine = compared(session_of(runs.tied(scale=2.0**12)))
    lossy = compared(session_of(runs.tied(scale=2.0**-20)))
    assert fine.nonzero == lossy.nonzero
    assert by_kind(fine.flushed, "weight_grad") == 0
    assert fine.relative_error < 5e-3
    assert by_kind(lossy.flushed, "activation_grad") > 0.5 * by_kind(lossy.nonzero, "activation_grad")
    assert lossy.relative_error > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_kept_exponents_are_those_of_the_values(dtype):
    torch.manual_seed(0)
    spread = torch.exp2(torch.randint(-120, 120, (5000,)).double())
    values = (torch.randn(5000).double() * spread).to(dtype)
    odd = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.5, math.inf, -math.inf, math.nan], dtype=dtype)
    dense = torch.cat([values, odd]).reshape(-1, 4).t()  # not contiguous
    expected = torch.frexp(dense.float()).exponent.clamp(-126, 127)
    expected = expected.masked_fill(~dense.float().isfinite(), 127).masked_fill(dense == 0, ranges._ZERO)
    assert torch.equal(ranges._exponents(dense), expected.to(torch.int8))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_the_optimizer_gets_follows_from_what_the_backward_delivers(accumulation):
    session = session_of(runs.tied(accumulation=accumulation, precision="fp32", scale=None))
    reference, received = ReferenceGradients(None), GradientProbe()
    with session.reference():
        stepped(session, reference, received)
    found = reference.received(session)
    assert found.keys() == received.gradients.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in received.gradients.items())


def test_kept_gradients_are_gone_with_their_last_name():
    session = session_of(runs.tied())
    reference = ReferenceGradients(None)
    probe = ZeroedProbe(reference)
    with session.reference():
        stepped(session, reference)
    stepped(session, probe)
    kept = [weakref.ref(gradient) for gradient in reference.weights.values()]
    gc.disable()  # a circle of references would wait for it, with a copy of the model
    try:
        del reference, probe
        assert kept
        assert not any(gradient() is not None for gradient in kept)
    finally:
        gc.enable()
