"""A recommendation leaves out the search for other causes where its own replay shows that nothing would be found."""

from __future__ import annotations

import itertools

import pytest
import torch

from ampdoctor import TrainingRun
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.replay.session import Session
from ampdoctor.workflows import recommend as workflow
from ampdoctor.workflows.measure import measure
from ampdoctor.workflows.recommend import classified
from ampdoctor.workflows.replay_under_change import observe
from ampdoctor.workflows.requests import ReplayRequest, keep_all


def squares(model, batch):
    return model(batch).float().square().mean()


def run(*, scale=1024.0, loss=squares, after_step=None, state=None, clip=None, precision="fp16", autocast=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    if state is not None:
        state(model)
    return TrainingRun(
        model=model if autocast else model.half(),
        batches=[torch.randn(6, 8) for _ in range(3)],
        loss=loss,
        after_step=after_step,
        max_grad_norm=clip,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3),
        scaler={"init_scale": scale, "growth_interval": 2000} if autocast else None,
        precision=precision,
        autocast=autocast,
    )


def counting():
    calls = itertools.count().__next__

    def loss(model, batch):
        calls()
        return squares(model, batch)

    return loss


def clamped(model):
    with torch.no_grad():
        model[0].weight[0, 0] = 65504.0


@pytest.fixture
def searches(monkeypatch):
    made = []

    def searched(request, own, steps, progress, set_aside):
        made.append(classified(request, own, steps, progress, set_aside))
        return made[-1]

    monkeypatch.setattr(workflow, "classified", searched)
    return made


def recommended(make, **arguments):
    return workflow.recommend(ReplayRequest(factory=lambda: make(**arguments), device="cpu"))


def test_a_calm_run_is_not_searched_and_a_search_finds_nothing(searches):
    report = recommended(run)
    assert searches == []
    request = ReplayRequest(factory=run, device="cpu")
    found, cut = classified(request, report.findings, report.run["steps"], None, keep_all)
    assert (found, cut) == (report.findings, ())


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": 2.0**24},
        {"loss": counting()},
        {"after_step": lambda run, step: None},
        {"state": clamped},
        {"precision": "bf16"},
        {"autocast": False},
    ],
    ids=["it skips", "it counts", "more after a step", "a sick state", "nothing to scale", "updates are lost"],
)
def test_what_might_hide_something_is_searched(arguments, searches):
    recommended(run, **arguments)
    assert len(searches) == 1


def test_each_step_is_replayed_as_often_as_it_must():
    """Once for its formats and three times in fp32; 3 as they are and 3 changed, of which each is compared but for the
    first, whose reference is the measured step; the last once more at both scales. The first serves as its shadow."""
    report = recommended(run)
    assert report.run["replays"] == 1 + 3 + 3 + 2 + 3 + 2 + 2


def test_fp32_is_clipped_where_the_run_is():
    session = Session(run(clip=1e-3), device=torch.device("cpu"))
    start = session.snapshot()
    with autocast_policy("cuda"):
        taken = measure(session, start, 3)
        seen = observe(session, start, 3, taken.plan, moment=taken.moments[0])
    for row in (*seen.rows, *seen.references):
        assert row.gradient_norm == pytest.approx(1e-3, rel=1e-2)
