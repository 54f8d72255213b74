"""What a profile says of another accumulation, beside fp16 steps that are replayed with that accumulation."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from ampdoctor.batching.flushed import flushed_plan
from ampdoctor.batching.plans import BatchPlan
from ampdoctor.evidence.run_facts import Place
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.replay.session import Session
from ampdoctor.workflows.measure import measure, shadowed
from ampdoctor.workflows.profile import profile_section
from tests.workflows.measuring import shadow_runs as runs

pytestmark = pytest.mark.xdist_group("flushed replay")  # its profiles are made once

CLOSE = 0.1
"""Of what is predicted to what is measured, where between 0.1 and 10 % flush."""
WIDE = {"lstm": {"width": 128}}
"""So that enough elements flush to be counted: of a width of 32, four in a thousand are a hundred."""
SAME = 0.02
"""Of what is predicted from another accumulation to what the histograms of the very steps predict."""
STEPS = 8
SCALES = (0.25, 1.0, 4.0, 16.0)
DATA = {
    "convolutions": functools.partial(runs.noise, 32, 3, 16, 16),
    "lstm": functools.partial(runs.noise, 64, 12, 8),
}


def run_of(network, batches, **more):
    """The weights stay where they are, so that the two runs differ by how their batches are cut alone."""
    still = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-6)}
    return runs.NETWORKS[network](batches=batches, **WIDE.get(network, {}), **still, **more)


def measured(run, steps, scales=()):
    with autocast_policy("cuda"):
        session = Session(run, device=torch.device("cpu"))
        taken = measure(session, session.snapshot(), steps)
        return shadowed(session, taken, scales)[0] if scales else taken.ranges


@functools.cache
def profile(network):
    return measured(run_of(network, DATA[network](steps=STEPS)), STEPS)


def beside(network, accumulation, cut=1):
    """For each scale, what is predicted of a plan and what the replayed steps lost; `cut` divides micro-batches."""
    batches = [part for whole in DATA[network](steps=STEPS) for part in whole.split(len(whole) // cut)]
    replayed = measured(run_of(network, batches, accumulation_steps=accumulation), 2, SCALES)
    micro = len(batches[0])
    before = BatchPlan(micro_batch=micro * cut, accumulation=1, data_parallel=accumulation)
    after = BatchPlan(micro_batch=micro, accumulation=accumulation, data_parallel=cut)
    assert before.global_batch == after.global_batch
    for shadow in profile_section(replayed, None)["shadows"]:
        known = profile(network)
        at_scale = replace(known, run=replace(known.run, loss_scale=shadow["scale"]))
        yield flushed_plan(at_scale, before, after), shadow


def total_of(found, kind):
    """The shares of all gradients of a kind."""
    (total,) = [one for one in found.totals if one.kind == kind]
    return total


def holds(network, found, shadow, kind, close=CLOSE):
    """A kind as a whole, and each of its sites but for what chance does; returns how many were in the band."""
    total, shares = shadow["flushed"][kind], total_of(found, kind)
    if not 1e-3 <= total["measured"] <= 0.1:
        return 0
    for name, slack in (("measured", close), ("predicted", SAME if close == CLOSE else close)):
        assert (1.0 - slack) * total[name] <= shares.after_most, name
        assert shares.after <= (1.0 + slack) * total[name], name
    sites = {Place(site["name"], kind, site["part"]).shown: site for site in shadow["sites"] if site["kind"] == kind}
    run = profile(network)
    nonzero = {
        s.place.shown: int(h.counts.sum()) for s, h in zip(run.sites, run.histograms, strict=True) if s.kind == kind
    }
    for layer in found.layers:
        site = sites.get(layer.layer)
        if layer.kind == kind and site is not None and 1e-3 <= site["measured"] <= 0.1:
            chance = 8.0 * math.sqrt(site["measured"] / min(site["nonzero"], nonzero[layer.layer]))
            slack = close * site["measured"] + chance
            assert layer.after - slack <= site["measured"] <= layer.after_most + slack, layer.layer
    return 1


def test_what_activation_gradients_lose_with_another_accumulation_is_predicted_to_a_tenth():
    held = 0
    for found, shadow in beside("convolutions", 4):
        assert total_of(found, "activation_grad").after > 1.5 * total_of(found, "activation_grad").before
        held += holds("convolutions", found, shadow, "activation_grad")
    assert held >= 2


@pytest.mark.slow
def test_what_weight_gradients_lose_lies_where_it_is_said_to():
    sure = [pair for pair in beside("lstm", 8, cut=2) if not total_of(pair[0], "weight_grad").lower_bound]
    assert sum(holds("lstm", found, shadow, "weight_grad") for found, shadow in sure) >= 1
