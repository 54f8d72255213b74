"""What a scaler refuses ends many a training; `run` says why, and says nothing where the loop lives with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ampdoctor.reports.fix_code import Code, code_of, setting_of
from ampdoctor.reports.next_step import next_step
from tests.live.calls.loops import watching


def made(*, half):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    return model.half() if half else model  # MADE


class Refused:
    """Trains until the scaler refuses, under watch."""

    def __init__(self, tmp_path, loop, *, half=False):
        with watching(tmp_path) as (self.reports, self.sentences, _):
            self.model = made(half=half)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            loop(self)

    def backward(self):
        self.optimizer.zero_grad()
        dtype = self.model[0].weight.dtype
        self.scaler.scale(self.model(torch.ones(2, 8, dtype=dtype)).float().mean()).backward()


def unscales(loop):
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)


def steps(loop):
    loop.backward()
    loop.scaler.step(loop.optimizer)


def line_of(mark):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


@pytest.mark.parametrize(("loop", "method"), [(unscales, "unscale_"), (steps, "step")])
def test_half_weights_are_named_with_the_line_that_made_them(tmp_path, loop, method):
    seen = []

    def kept(parts):
        seen.append(parts)
        loop(parts)

    with pytest.raises(ValueError, match="unscale FP16"):
        Refused(tmp_path, kept, half=True)
    (report,) = seen[0].reports
    (finding,) = report.findings
    assert (finding.code, finding.where.op, finding.where.source.line) == (
        "AMP407",
        f"scaler.{method}",
        line_of("MADE"),
    )
    assert "4 trained parameters are in fp16, the first of them 0.weight" in finding.message
    assert "autocast" in finding.help
    assert "order" not in finding.help
    assert code_of(finding.prescription, setting_of(report, finding), finding.cause) == Code()
    assert f"test_refused_calls.py:{line_of('MADE')}" in next_step(report).said
    assert seen[0].sentences == []


def test_a_call_out_of_turn_is_named_at_its_own_line(tmp_path):
    seen = []

    def twice(parts):
        seen.append(parts)
        unscales(parts)
        parts.scaler.unscale_(parts.optimizer)  # TWICE

    with pytest.raises(RuntimeError, match="already been called"):
        Refused(tmp_path, twice)
    (report,) = seen[0].reports
    (finding,) = report.findings
    assert (finding.where.op, finding.where.source.line) == ("scaler.unscale_", line_of("TWICE"))
    assert "float16" not in finding.message


def steps_twice(loop):
    loop.backward()
    encoder, decoder = loop.optimizer, torch.optim.SGD(loop.model.parameters(), lr=0.01)
    return loop.scaler.step(encoder), loop.scaler.step(decoder), loop.scaler.step(decoder)


def unscales_in_each_micro_batch(loop):
    unscales(loop)
    loop.scaler.unscale_(loop.optimizer)


def never_updates(loop):
    for _ in range(2):
        unscales(loop)
        loop.scaler.step(loop.optimizer)


@pytest.mark.parametrize(
    ("loop", "change", "line"),
    [
        (steps_twice, "call scaler.update() once, after scaler.step(decoder)", "scaler.update()  # once"),
        (
            unscales_in_each_micro_batch,
            "call scaler.unscale_(loop.optimizer) once, after the last micro-batch's backward",
            "scaler.unscale_(loop.optimizer)  # once they",
        ),
        (
            never_updates,
            "call scaler.unscale_(loop.optimizer) before scaler.step(loop.optimizer), and scaler.update() after",
            "scaler.update()",
        ),
    ],
)
def test_the_call_that_is_missing_is_named_with_the_users_variable(tmp_path, loop, change, line):
    seen = []

    def kept(parts):
        seen.append(parts)
        loop(parts)

    with pytest.raises(RuntimeError, match="called"):
        Refused(tmp_path, kept)
    (report,) = seen[0].reports
    (finding,) = report.findings
    assert finding.prescription.value == change
    code = code_of(finding.prescription, setting_of(report, finding), finding.cause)
    assert len(code.torch) <= 3
    assert any(one.startswith(line) for one in code.torch)


def test_another_error_is_no_refusal(tmp_path):
    seen = []

    def fails(parts):
        seen.append(parts)
        unscales(parts)
        with pytest.raises(RuntimeError):
            parts.scaler.unscale_(parts.optimizer)
        parts.scaler.step(parts.optimizer)
        raise KeyError("the loop's own")

    with pytest.raises(KeyError):
        Refused(tmp_path, fails)
    assert seen[0].reports == []


@pytest.mark.parametrize(("asks", "divides"), [(False, False), (True, True)])
def test_a_step_past_the_scaler_is_why_it_refuses_the_update(tmp_path, asks, divides):
    seen = []

    def past(parts):
        seen.append(parts)
        if asks:
            parts.scaler.get_scale()
        parts.backward()
        if divides:
            for parameter in parts.model.parameters():
                parameter.grad.div_(64.0)
        parts.optimizer.step()  # PAST
        parts.scaler.update()

    with pytest.raises(AssertionError, match="No inf checks"):
        Refused(tmp_path, past)
    (report,) = seen[0].reports
    (finding,) = report.findings
    assert (finding.code, finding.where.op, finding.where.source.line) == ("AMP407", "optimizer.step", line_of("PAST"))
    assert finding.prescription.detail == "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()"
