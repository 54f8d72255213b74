"""What a watched loop is told of values that were not finite before any op of it, or became so in its first step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ampdoctor.live.op_watch import StepWatch


class SickError(BaseException):
    """Ends a loop as a failed test is ended."""


def _stop(report):
    raise SickError(report)


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def told_by(loop):
    """What a watch says of a loop: (code, step, message), or None."""
    watch = StepWatch(_stop)
    try:
        with watch.watching():
            loop()
    except SickError:
        pass
    return watch.report and tuple(
        (finding.code, finding.where.step, finding.message) for finding in watch.report.findings
    )


def train(model, batches, optimizer=None):
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for x in batches:
        step(model, optimizer, x)


class Acting(nn.Module):
    """Acts on itself in its first call."""

    def __init__(self, act):
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), act
        self.register_buffer("kept", torch.zeros(4, 4))

    def forward(self, x):
        act, self.act = self.act, None
        if act is not None:
            act(self)
        return (self.fc(x) + self.kept.clamp(max=0)).softmax(-1)


def test_a_running_variance_that_overflows_in_the_first_step_is_seen_there():
    def loop():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        train(model, [torch.randn(3, 4) * 1e30 for _ in range(3)])

    ((code, at, message),) = told_by(loop)
    assert (code, at) == ("AMP201", 0)
    assert "aten.batch_norm in module 1 makes an infinity" in message


@pytest.mark.parametrize(
    "act",
    [
        lambda model: model.kept.add_(torch.inf),
        lambda model: setattr(model, "kept", torch.exp(model.kept + 1e3)),
    ],
    ids=["in_place", "assigned"],
)
@pytest.mark.parametrize("known", [False, True])
def test_a_buffer_that_becomes_infinite_in_the_first_step_is_seen_there(act, known):
    watch, model = StepWatch(_stop), Acting(act)
    with pytest.raises(SickError), watch.watching(model if known else None):
        train(model, [torch.ones(4, 4)] * 3)
    assert (watch.report.findings[0].where.step, watch.report.findings[0].where.nonfinite) == (0, "inf")


def test_masks_are_health_whenever_they_are_made():
    def mask():
        return torch.full((4, 4), -torch.inf).triu(1)

    class Early(Acting):
        def __init__(self):
            super().__init__(None)
            self.kept = mask()
            self.register_buffer("logarithm", torch.log(torch.tril(torch.ones(4, 4))))

        def forward(self, x):
            return super().forward(x) + self.logarithm.softmax(-1)

    assert told_by(lambda: train(Early(), [torch.ones(4, 4)] * 2)) is None
    late = Acting(lambda model: setattr(model, "kept", mask()))
    assert told_by(lambda: train(late, [torch.ones(4, 4)] * 2)) is None


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("made", ["tensor", "numpy", "loader"])
def test_a_batch_that_is_not_finite_is_the_datas_fault(value, made):
    row = np.array([1.0, 2.0, value, 3.0], dtype=np.float32)

    def loop():
        batches = {
            "tensor": lambda: [torch.tensor([row.tolist()])],
            "numpy": lambda: [torch.from_numpy(row[None])],
            "loader": lambda: torch.utils.data.DataLoader([row, row], batch_size=2),
        }[made]()
        train(nn.Linear(4, 4), batches)

    what = "NaN" if np.isnan(value) else "an infinity"
    assert told_by(loop) == (("AMP204", 0, f"step 0: the batch itself holds {what}"),)


def test_a_mask_that_a_model_is_called_with_is_no_bad_batch():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, mask):
            return (self.fc(x) + mask).softmax(-1)

    def loop(mask):
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(4, 4), torch.from_numpy(mask))[:, 0].sum().backward()
        optimizer.step()

    full = np.full((4, 4), -np.inf, dtype=np.float32)
    assert told_by(lambda: loop(np.triu(full, 1))) is None
    ((code, _, message),) = told_by(lambda: loop(full))
    assert code == "AMP202"
    assert "aten.softmax" in message
    assert "a whole row of its operand is masked" in message


def test_an_overflow_before_the_model_is_called_stays_the_ops():
    def loop():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            made = first(torch.full((2, 4), 1e38)).abs() * 1e38
        train(second, [made])

    ((code, _, message),) = told_by(loop)
    assert code == "AMP201"
    assert "aten.mul" in message


@pytest.mark.parametrize("make", [lambda: torch.full((2,), torch.nan), lambda: torch.tensor([torch.nan, torch.inf])])
def test_a_frozen_parameter_that_nothing_reads_may_hold_anything(make):
    def loop(*, read):
        model = nn.Linear(4, 4)
        model.register_parameter("junk", nn.Parameter(make(), requires_grad=False))
        if read:
            model.register_forward_hook(lambda module, args, out: out + module.junk.sum())
        train(model, [torch.ones(3, 4)] * 3)

    assert told_by(lambda: loop(read=False)) is None
    assert told_by(lambda: loop(read=True)) == (("AMP101", 0, "step 0: junk holds NaN (state:junk)"),)


def test_a_nan_that_is_written_down_is_said_to_be():
    def loop():
        (nn.Linear(4, 4)(torch.ones(2, 4)) * torch.full((4,), torch.nan)).sum().backward()

    assert told_by(loop) == (("AMP202", 0, "step 0, loss: aten.full in the loss code writes NaN down"),)


def write_gradient(model):
    model.weight.grad.numpy()[:] = np.nan


def write_infinite_gradient(model):
    model.weight.grad.numpy()[:] = np.inf


def write_and_clip(model):
    write_gradient(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def write_parameter(model):
    model.weight.detach().numpy()[:] = np.nan


@pytest.mark.parametrize("write", [write_gradient, write_infinite_gradient, write_and_clip, write_parameter])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("at", [0, 1])
def test_what_is_written_past_the_dispatcher_is_nobodys_fault(write, make, at):
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters(), 0.1)

    def loop():
        for index in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            if index == at:
                write(model)
            optimizer.step()

    watch = StepWatch(_stop)
    with pytest.raises(SickError), watch.watching():
        loop()
    assert watch.report.findings == ()
    assert [error.kind for error in watch.report.errors] == ["unattributed"]
    assert watch.report.run["steps"] == at + 1


def test_a_gradient_that_was_not_cleared_before_the_loop_is_said_to_be():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(3, 4)).sum().backward()
    write_gradient(model)

    def loop():
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    said = "step 0: the gradient of weight holds NaN of an earlier step: it was not cleared"
    assert told_by(loop) == (("AMP407", 0, said),)


@pytest.mark.parametrize("after_an_optimizers", [False, True])
def test_an_update_by_hand_counts_also_where_no_step_of_torchs_follows(after_an_optimizers):
    def loop(factor):
        model = nn.Linear(4, 4)
        if after_an_optimizers:
            train(model, [torch.ones(3, 4)])
        model.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad * factor)

    assert told_by(lambda: loop(0.1)) is None
    ((code, step, message),) = told_by(lambda: loop(torch.inf))
    assert (code, step) == ("AMP202", int(after_an_optimizers))
    assert "a number among its arguments is inf" in message


def test_a_moment_that_is_infinite_before_the_loop_is_the_checkpoints_fault():
    def loop(name):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer, torch.ones(3, 4))
        optimizer.state[model.weight][name][0, 0] = torch.inf
        watch = StepWatch(_stop)
        with pytest.raises(SickError), watch.watching():
            train(model, [torch.ones(3, 4)] * 2, optimizer)
        return watch.report.findings[0]

    found = loop("exp_avg_sq")
    assert (found.code, found.cause, found.where.step) == ("AMP103", "bad_checkpoint", 0)
    assert found.message == "step 0: weight holds an infinity (optimizer_state:exp_avg_sq)"
