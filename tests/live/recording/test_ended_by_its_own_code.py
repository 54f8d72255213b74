"""A loop whose own code ends a step before there is a loss: the forward that went non-finite is looked at."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

import ampdoctor


class Net(nn.Module):
    """Overflows in fp16 where its input is large; may end the step in its own forward."""

    def __init__(self, check=None):
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.check, self.mask = check, None

    def forward(self, x):
        hidden = self.gate(x) * self.value(x)
        out = self.head(hidden - hidden.mean(-1, keepdim=True)).float()
        if self.mask is not None:
            out = out.masked_fill(self.mask, -torch.inf)
        if self.check is not None:
            self.check(out)
        return {"boxes": out}


def compared(out):
    assert (out.sigmoid() <= 1.0).all(), "boxes with x2 < x1"


def drawn(out):
    return torch.multinomial(out.softmax(-1), 1)


def distributed(out):
    return torch.distributions.Normal(out[:, :2], 1.0, validate_args=True)


def left(out):
    if bool(out.isnan().any()):
        sys.exit("diverged")


def raised(out):
    if not bool(out.isfinite().all()):
        raise RuntimeError("stopping here")


def looked_up(out):
    if float(out.detach().abs().amax()) >= 0.0:
        raise KeyError("labels")


def stopped(out):
    raise StopIteration


class EnoughError(Exception):
    """What a loop ends itself with."""


def is_enough(out):
    raise EnoughError


@pytest.fixture
def trained(tmp_path):
    """Returns a function that trains, watched, and gives what has ended it, what was told and the lines of the log."""

    def train(check, *, bad=None, inside=False, steps=6, mask=None, at=None, caught=(), **options):
        torch.manual_seed(0)
        model, told, error = Net(), [], None
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        try:
            with ampdoctor.watch(folder=tmp_path / "health", tell=told.append, **options):
                for step in range(steps):
                    x = torch.randn(16, 8) * (3000.0 if step == bad else 1.0)
                    last = at in (None, step)
                    model.check, model.mask = (check if inside and last else None), mask
                    try:
                        with torch.autocast("cpu", torch.float16):
                            out = model(x)["boxes"]
                        if not inside and last:
                            check(out)
                    except caught:
                        continue
                    loss = (out if mask is None else out.masked_fill(mask, 0.0)).pow(2).mean()
                    optimizer.zero_grad()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
        except BaseException as raised:  # noqa: BLE001 - whatever has ended it
            error = raised
        lines = [json.loads(line) for line in (tmp_path / "health" / "log.jsonl").read_text().splitlines()]
        return error, told, lines

    return train


@pytest.mark.parametrize(
    ("check", "kind", "inside"),
    [
        (compared, AssertionError, True),
        (drawn, RuntimeError, False),
        (distributed, ValueError, True),
        (left, SystemExit, False),
        (raised, RuntimeError, False),
    ],
)
def test_the_forward_that_went_non_finite_is_named_and_its_bundle_kept(check, kind, inside, trained, tmp_path):
    error, (report,), lines = trained(check, bad=3, inside=inside)
    assert type(error) is kind
    assert report.run["step"] == 3
    finding = report.findings[0]
    assert (finding.code, finding.where.op) == ("AMP201", "aten.mul")
    assert finding.evidence["raised"].startswith(kind.__name__)
    assert finding.prescription.status == "verified"
    assert (tmp_path / "health" / "bundle-3").is_dir()
    assert (lines[-1]["kind"], lines[-1]["reason"]) == ("end", kind.__name__)


@pytest.mark.parametrize(("inside", "masked"), [(False, True), (True, True)])
@pytest.mark.parametrize("check", [looked_up, stopped, is_enough])
def test_a_loop_that_ends_for_another_reason_is_told_nothing(check, inside, masked, trained, tmp_path):
    mask = torch.tensor([False, False, False, True]) if masked else None
    error, told, lines = trained(check, inside=inside, mask=mask, at=2)
    assert type(error) is not AssertionError
    assert told == []
    assert not list((tmp_path / "health").glob("bundle-*"))
    assert lines[-1]["kind"] == "end"


@pytest.mark.parametrize("asked", [lambda loss: loss, lambda loss: loss.detach()], ids=["loss", "detached"])
def test_a_magnitude_of_what_overflows_is_no_mask_s(asked, tmp_path):
    torch.manual_seed(0)
    net, reports = nn.Linear(8, 1), []
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with ampdoctor.watch(folder=tmp_path / "health", tell=reports.append):
        for step in range(6):
            with torch.autocast("cpu", torch.float16):
                out = -(net(torch.randn(16, 8)).abs() + 1.0) * (7e4 if step == 3 else 1.0)
            loss = (out.float() - 1.0).abs().mean()  # of -inf alone, where it overflows
            if not asked(loss).isfinite():
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (report,) = reports
    assert (report.run["step"], report.findings[0].code) == (3, "AMP201")


def test_what_the_loop_catches_and_goes_on_after_is_the_loop_s_own_matter(trained):
    error, told, lines = trained(compared, bad=3, caught=(AssertionError,))
    assert (error, told) == (None, [])
    assert [line["step"] for line in lines if line["kind"] == "step"] == [0, 1, 2, 3, 4]


def test_an_error_about_numbers_that_a_mask_did_not_make_is_no_finding(trained):
    def refuses(out):
        raise ValueError("the learning rate is not finite")

    error, told, _ = trained(refuses, mask=torch.tensor([False, False, False, True]), at=2)
    assert (type(error), told) == (ValueError, [])


def test_stopping_leaves_the_loop_s_own_error_where_that_has_ended_it(trained):
    error, (report,), lines = trained(compared, bad=3, on_sick="stop")
    assert type(error) is AssertionError
    assert report.findings[0].code == "AMP201"
    assert (lines[-1]["kind"], lines[-1]["exit_code"], lines[-1]["reason"]) == ("end", 1, "AssertionError")
