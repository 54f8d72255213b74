"""Shadow steps: what is predicted from fp32 histograms beside what the half-precision step of the same state does."""

from __future__ import annotations

import copy
import functools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.ranges.profile import SURE_BELOW, Shadow
from ampdoctor.replay.session import Session
from ampdoctor.workflows.measure import measure, shadowed
from ampdoctor.workflows.profile import profile_section
from tests.ranges.known import collected, place, values
from tests.workflows.measuring import shadow_runs as runs

pytestmark = pytest.mark.xdist_group("shadowing")  # its profiles are made once

SCALES = (1.0, 2.0**-4, 2.0**8)
CLOSE = 0.1
"""Of the prediction to what is measured, where between 0.1 and 10 % of a kind's elements flush."""


def shadowed_run(run, scales=SCALES, steps=3):
    """The profile with its shadows, and the session, which is at its start again."""
    with autocast_policy("cuda"):
        session = Session(run, device=torch.device("cpu"))
        start = session.snapshot()
        taken = measure(session, start, steps)
        return shadowed(session, taken, scales)[0], session


@functools.cache
def usual(network="transformer"):
    """The profile of a run as it stands, for all who only look at it."""
    return shadowed_run(getattr(runs, network)())[0]


def shown(ranges):
    return {shadow["scale"]: shadow for shadow in profile_section(ranges, None)["shadows"]}


def holds(ranges):
    """Every prediction of activation gradients, as a whole and by site; how many there were to hold."""
    held = 0
    for shadow in shown(ranges).values():
        total = shadow["flushed"]["activation_grad"]
        if 1e-3 <= total["measured"] <= 0.1:
            held += 1
            assert total["predicted"] == pytest.approx(total["measured"], rel=CLOSE), shadow["scale"]
        for site in (s for s in shadow["sites"] if s["kind"] == "activation_grad" and 1e-3 <= s["measured"] <= 0.1):
            # a site has few elements at the threshold: twice four times the spread of such a count, beside the tenth
            chance = 8.0 * math.sqrt(site["measured"] / site["nonzero"])
            assert abs(site["predicted"] - site["measured"]) <= CLOSE * site["measured"] + chance, site["name"]
    return held


@pytest.mark.slow
@pytest.mark.parametrize("network", runs.NETWORKS)
def test_what_activation_gradients_lose_is_predicted_to_a_tenth(network):
    ranges = usual(network)
    assert [shadow.scale for shadow in ranges.shadows] == list(SCALES)
    assert all(shadow.steps == (0, 2) for shadow in ranges.shadows)
    assert holds(ranges) >= 1
    measured = [shown(ranges)[scale]["flushed"]["activation_grad"]["measured"] for scale in sorted(SCALES)]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] > 5.0 * measured[1]


@pytest.mark.parametrize("loop", ["two_optimizers", "pure_half"])
def test_it_is_predicted_in_other_loops_as_well(loop):
    ranges = usual(loop)
    assert holds(ranges) >= 2
    late = () if loop == "pure_half" else (2,)  # a half model's reference is another model
    assert all(shadow.steps == (0, *late) for shadow in ranges.shadows)
    assert all(shadow.relative_error < 0.02 for shadow in ranges.shadows)


def test_a_dead_scale_has_no_shadow():
    dead, session = shadowed_run(runs.lstm(scaler={"init_scale": -1024.0}))
    assert dead.shadows == ()
    assert session.scaler.get_scale() == -1024.0


def test_half_parameters_lose_nothing_where_the_factor_is_divided_out():
    ranges, _ = shadowed_run(runs.pure_half(), scales=(2.0**16,))
    flushed = shown(ranges)[2.0**16]["flushed"]["weight_grad"]
    assert (flushed["measured"], flushed["predicted"]) == (0.0, 0.0)


def everything(session):
    """Values of all that a step can change, without the gradients: the next step begins by clearing them."""
    state = {
        "model": {k: v.clone() for k, v in session.model.state_dict().items()},
        "optimizers": copy.deepcopy({k: o.state_dict() for k, o in session.optimizers.items()}),
        "scaler": copy.deepcopy(session.scaler.state_dict()),
        "dtypes": [p.dtype for p in session.model.parameters()],
        "training": [m.training for m in session.model.modules()],
        "precision": session.precision,
        "hooks": [
            len(hooks or ())
            for owner in (*session.model.modules(), *session.model.parameters())
            for hooks in (getattr(owner, "_forward_hooks", ()), owner._backward_hooks)
        ],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),  # noqa: NPY002  # what users draw from
        "python": random.getstate(),
        "functions": (torch.autograd.backward, torch.amp.GradScaler.scale, torch.Tensor.backward),
    }
    return torch.utils._pytree.tree_flatten(state)


def same(one, other):
    (leaves, spec), (others, other_spec) = one, other
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, torch.Tensor | np.ndarray):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        else:
            assert a is b or a == b


def raising():
    """A loop that gives up where a gradient is not finite, as many do; and it draws random numbers."""

    def step(model, batch, optimizer, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = runs.next_token(model, batch) * (1.0 + 0.0 * random.random() * np.random.rand())  # noqa: NPY002
        loss.backward()
        if not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
            raise FloatingPointError("gradient overflow")
        optimizer.step()
        return loss

    return runs.transformer(step=step, scaler=None)


@pytest.mark.parametrize(
    "make",
    [
        runs.two_optimizers,
        raising,
        *(pytest.param(other, marks=pytest.mark.slow) for other in (runs.convolutions, runs.pure_half)),
    ],
    ids=lambda make: make.__name__,
)
def test_everything_is_as_before(make):
    torch.manual_seed(7)
    with autocast_policy("cuda"):
        session = Session(make(), device=torch.device("cpu"))
        assert session.has_step(1)
        session.step(0)  # so that moments and batch statistics are there
        if session.run.step is None:
            session.model.zero_grad()  # as a step of ours begins: a snapshot does not keep what it clears
        start = session.snapshot()
        before = everything(session)
        taken = measure(session, start, 2)
        same(before, everything(session))
        ranges, _ = shadowed(session, taken, (1.0, 2.0**40))
        same(before, everything(session))
    assert ranges.shadows


def test_a_scale_at_which_the_users_code_raises_has_no_shadow():
    ranges, _ = shadowed_run(raising(), scales=(2.0**40, 1.0, 2.0**41))
    assert [shadow.scale for shadow in ranges.shadows] == [1.0]
    assert ranges.shadows[0].steps == (0, 2)
    assert shown(ranges)[1.0]["flushed"]["activation_grad"]["measured"] > 0.0


def test_a_loss_that_wants_fp32_has_a_profile_without_shadows():
    def loss(model, ids):
        logits = model(ids[:, :-1])
        assert logits.dtype is torch.float32, "logits must be fp32"
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    with autocast_policy("cuda"):
        session = Session(runs.transformer(loss=loss), device=torch.device("cpu"))
        start = session.snapshot()
        taken = measure(session, start, 2)
        assert "logits must be fp32" in taken.notes[0]
        ranges, _ = shadowed(session, taken, SCALES)
    assert (ranges.shadows, ranges.steps) == ((), 2)


def test_an_fp32_run_is_shadowed_in_fp16():
    ranges, session = shadowed_run(runs.transformer(precision="fp32", scaler=None))
    assert session.precision.compute == "fp32"
    assert shadowed_run(runs.transformer(precision="bf16", scaler=None))[0].shadows == ()
    assert [s.flushed.tolist() for s in ranges.shadows] == [s.flushed.tolist() for s in usual().shadows]


def labels(ranges, scale):
    shadow = shown(ranges)[scale]
    assert not shadow["flushed"]["activation_grad"]["lower_bound"]
    by_site = {(s["kind"], s["lower_bound"]) for s in shadow["sites"]}
    assert by_site == {("activation_grad", False), ("weight_grad", shadow["flushed"]["weight_grad"]["lower_bound"])}
    return shadow["flushed"]["weight_grad"]["lower_bound"]


@pytest.mark.parametrize("network", ["transformer", "convolutions"])
def test_a_weight_gradient_is_a_lower_bound_where_an_activation_gradient_flushes(network):
    ranges, _ = shadowed_run(runs.NETWORKS[network](), scales=(2.0**-8, 2.0**16))
    assert labels(ranges, 2.0**-8)
    assert not labels(ranges, 2.0**16)


@pytest.mark.parametrize("share", [SURE_BELOW, 1.001 * SURE_BELOW])
def test_one_activation_gradient_beyond_a_hundredth_decides(share):
    one, other, weight = place("a"), place("b"), place("b.weight", "weight_grad")
    ranges = collected([{one: values(0), other: values(0), weight: values(0)}])
    nonzero = np.full(3, 100_000)
    shadow = Shadow(
        scale=1.0,
        steps=(0,),
        nonzero=nonzero,
        flushed=np.zeros(3, dtype=np.int64),
        predicted=nonzero * np.array([share, 0.0, 0.3]),
        relative_error=0.0,
        predicted_error=0.0,
    )
    assert labels(replace(ranges, shadows=(shadow,)), 1.0) == (share > SURE_BELOW)
