"""A run that says fp16 and computes in another format is not healthy: nothing is known of what fp16 does to it."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from torch import nn

from ampdoctor.cli.run_command import judge
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


class Scaled(nn.Module):
    """Autocast casts nothing of it, on a GPU either."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, batch):
        return (batch * self.weight).tanh()


def made(context=None, *, model=None, precision="fp16", autocast=True, updates="by the optimizer"):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(model, batch, scaler):
        optimizer.zero_grad()
        with context() if context is not None else contextlib.ExitStack():
            loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
        scaler.scale(loss).backward()
        if updates == "by the optimizer":
            scaler.step(optimizer)
            scaler.update()
        elif updates == "by hand":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01 * parameter.grad)
        return loss

    batches = [torch.randn(4, 8) for _ in range(3)]
    return TrainingRun(
        model=model, batches=batches, optimizer=optimizer, step=step, precision=precision, autocast=autocast
    )


def stands_in():
    return contextlib.nullcontext()


def switched_off():
    return torch.autocast("cuda", enabled=False)


def stands_in_bf16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def unnamed():
    return torch.autocast("cpu")


@pytest.fixture
def searched(check_report):
    def search(**arguments):
        report = bisect_nan(ReplayRequest(factory=lambda: made(**arguments), steps=2))
        check_report(render_json(report))
        return report

    return search


@pytest.mark.parametrize(
    ("context", "computed", "decides"),
    [
        (stands_in, "fp32", "enters no autocast"),
        (switched_off, "fp32", "autocast at {} is switched off there"),
        (unnamed, "bf16", "autocast at {} names no dtype"),
    ],
)
def test_a_run_that_leaves_the_path_of_a_gpu_is_inconclusive(searched, context, computed, decides):
    report = searched(context=context)
    assert (report.verdict, judge(report).code) == ("inconclusive", 2)
    (left_out,) = (one for one in report.skipped if one.kind == "not_in_half")
    line = inspect.getsourcelines(context)[1] + 1
    assert decides.format(f"tests/workflows/opening/test_in_half.py:{line}") in left_out.reason
    assert left_out.reason.startswith(f"step 0 computes in {computed}: ")
    assert "compute in the format that it says" in next_step(report).said


def test_a_model_that_was_to_be_half_and_is_not_is_named(searched):
    report = searched(autocast=False)
    assert report.verdict == "inconclusive"
    assert "they have float32" in next(one.reason for one in report.skipped if one.kind == "not_in_half")


@pytest.mark.parametrize(
    "arguments",
    [
        {"context": lambda: torch.autocast("cuda")},
        {"context": lambda: torch.autocast("cpu", dtype=torch.bfloat16)},
        {"context": lambda: torch.autocast("cuda"), "model": Scaled()},
        {"context": stands_in, "precision": "fp32"},
        {"context": stands_in, "model": nn.Linear(8, 2).half(), "autocast": False},
    ],
    ids=["autocast", "bf16 by name", "nothing to cast", "fp32 on purpose", "pure half"],
)
def test_what_computes_as_it_says_is_healthy(searched, arguments):
    assert searched(**arguments).verdict == "healthy"


def test_steps_that_update_nothing_are_not_healthy(searched):
    report = searched(context=stands_in_bf16, precision="bf16", updates="none")
    assert (report.verdict, judge(report).code) == ("inconclusive", 2)
    assert [error.what for error in report.errors] == ["updates"]
    assert "call optimizer.step()" in report.errors[0].message


def test_updates_by_hand_are_updates(searched):
    report = searched(context=stands_in_bf16, precision="bf16", updates="by hand")
    assert report.verdict == "healthy"
    (check,) = (one for one in report.checks if one.name.startswith("gradients and updates"))
    assert check.result == "nothing to compare: no optimizer was given a gradient"
