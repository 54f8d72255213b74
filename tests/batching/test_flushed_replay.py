"""What a profile says of another accumulation, beside fp16 steps that are replayed with that accumulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ampdoctor.batching.flushed import flushed_plan
from ampdoctor.batching.plans import BatchPlan
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.replay.session import Session
from ampdoctor.workflows.measure import measure, shadowed
from ampdoctor.workflows.profile import profile_section
from tests.workflows.measuring import shadow_runs as runs

STEPS = 8
SCALES = (0.25, 1.0, 4.0, 16.0)


def measured(steps, scales=(), **more):
    """The weights stay where they are, so that two runs differ by how their batches are cut alone."""
    batches = runs.noise(32, 3, 16, 16, steps=STEPS)
    run = runs.convolutions(batches=batches, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-6), **more)
    with autocast_policy("cuda"):
        session = Session(run, device=torch.device("cpu"))
        taken = measure(session, session.snapshot(), steps)
        return shadowed(session, taken, scales)[0] if scales else taken.ranges


def test_what_activation_gradients_lose_with_another_accumulation_is_predicted_to_a_tenth():
    known, replayed = measured(STEPS), measured(2, SCALES, accumulation_steps=4)
    before = BatchPlan(micro_batch=32, accumulation=1, data_parallel=4)
    after = BatchPlan(micro_batch=32, accumulation=4, data_parallel=1)
    held = 0
    for shadow in profile_section(replayed, None)["shadows"]:
        at_scale = replace(known, run=replace(known.run, loss_scale=shadow["scale"]))
        found = flushed_plan(at_scale, before, after)
        (shares,) = [one for one in found.totals if one.kind == "activation_grad"]
        assert shares.after > 1.5 * shares.before
        total = shadow["flushed"]["activation_grad"]
        if 1e-3 <= total["measured"] <= 0.1:
            held += 1
            assert shares.after == pytest.approx(total["measured"], rel=0.1)
            assert shares.after == pytest.approx(total["predicted"], rel=0.02)
    assert held >= 2
