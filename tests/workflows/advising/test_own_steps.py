"""A recommendation for steps of the user's own: the healthy ones are called so, and their sick twins are found."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.probes.gradients import GradientProbe, relative_error
from ampdoctor.replay.session import Session
from ampdoctor.workflows.changes import rescaled
from ampdoctor.workflows.recommend import recommend
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows.advising import own_steps


def recommended(name, **arguments):
    return recommend(ReplayRequest(factory=f"{own_steps.__file__}:{name}", arguments=arguments, device="cpu"))


def harmful(report):
    return [finding.code for finding in report.findings if finding.severity in ("error", "warning")]


@pytest.mark.parametrize("name", ["maml", "per_sample"])
def test_gradients_inside_of_a_step_have_the_scale_of_their_own_loss(name):
    report = recommended(name)
    assert report.verdict == "healthy"
    assert not harmful(report)
    assert report.scaler.observed.relative_error < 0.01


UNDERFLOW = {"small": 2.0**-22, "loss_scale": 1.0}


def test_underflow_beside_gradients_inside_of_a_step_is_found():
    assert harmful(recommended("maml", **UNDERFLOW)) == ["AMP301"]


@pytest.mark.parametrize("name", ["maml", pytest.param("per_sample", marks=pytest.mark.slow)])
def test_a_departure_beside_gradients_inside_of_a_step_is_found(name):
    assert harmful(recommended(name, departs=True))


@pytest.mark.parametrize("name", ["maml", "checkpointed"])
def test_another_scale_is_tried_on_the_backward_alone(name):
    """Neither what the step asks for, nor a backward inside of the backward, is scaled or divided once more."""
    session = Session(getattr(own_steps, name)(), device=torch.device("cpu"))
    start, (own, other) = session.snapshot(), (GradientProbe(), GradientProbe())
    assert session.has_step(0)
    with session.reference(), session.watched(own):
        session.step(0)
    start.restore()
    with session.reference(), rescaled(2.0**6)(session), session.watched(other):
        session.step(0)
    session.close()
    assert own.gradients
    assert relative_error(other.gradients, own.gradients) < 1e-6


def of_the_comparison(report):
    return [one.reason for one in report.skipped if one.what == "comparison with fp32"]


def test_a_step_that_does_not_come_back_is_not_held_beside_fp32():
    report = recommended("policy")
    assert report.verdict == "healthy"
    assert not harmful(report)
    (reason,) = of_the_comparison(report)
    assert reason.endswith("the run keeps state that no snapshot holds")
    assert report.scaler.observed.relative_error is None


def test_underflow_in_a_run_that_does_not_come_back_is_found():
    assert harmful(recommended("policy", **UNDERFLOW)) == ["AMP301"]
