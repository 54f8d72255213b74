"""Proof: a change is verified only where the bad step and the next are clean and agree with fp32."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.evidence.report import Prescription
from ampdoctor.replay.session import Session
from ampdoctor.workflows import changes as change
from ampdoctor.workflows.trials import Trials, first_cure


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.factor = factor

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * self.factor))


def session_of(factor=1.0, *, loss=None, steps=4, **changes):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 3, generator=generator) for _ in range(steps)]
    run = TrainingRun(
        model=Net(factor),
        batches=data,
        loss=loss or (lambda m, x: m(x).float().square().mean()),
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
        **{"scaler": {"init_scale": 64.0}, **changes},
    )
    session = Session(run, device=torch.device("cpu"))
    for step in range(steps):
        assert session.has_step(step)
    return session


def trials_of(session, step=0, **changes):
    return Trials(session=session, snapshot=session.snapshot(), step=step, steps=4, **changes)


def attempt(trials, made, **changes):
    return trials.attempt("code", "value", made, "in words", **changes)


def weights(session):
    return {name: value.detach().clone() for name, value in session.model.state_dict().items()}


def test_a_healthy_step_is_verified_and_nothing_is_left_behind():
    session = session_of()
    before = weights(session)
    result = attempt(trials_of(session), change.no_change)
    assert (result.status, result.reason, result.detail) == ("verified", None, "in words")
    assert all(torch.equal(value, before[name]) for name, value in weights(session).items())
    assert session.replays == 5, "four steps and the reference of the first"


def test_a_later_step_that_fails_is_no_proof():
    def loss(m, x):
        return m(x).float().mean() / (0.0 if bool(m.last.bias.grad is None) and bool(x[0, 0] == MARK) else 1.0)

    session = session_of(loss=loss)
    session.tape._batches[2][0, 0] = MARK
    result = attempt(trials_of(session), change.no_change)
    assert (result.status, result.reason.partition(" (")[0]) == ("failed", "step 2 is still non-finite")


MARK = 7.0


def test_finite_gradients_far_from_fp32_fail():
    @contextmanager
    def double(session):
        original, session.run.loss = session.run.loss, lambda m, x: m(x).float().square().mean() * 2
        yield
        session.run.loss = original

    result = attempt(trials_of(session_of()), double)
    assert result.status == "failed"
    assert "away from fp32's (relative L2)" in result.reason


def test_a_reference_that_is_not_finite_proves_nothing():
    session = session_of(loss=lambda m, x: (m(x).float() * 0).log().mean())
    trials = trials_of(session)
    assert trials.reference() is None

    @contextmanager
    def harmless(session):
        original, session.run.loss = session.run.loss, lambda m, x: m(x).float().mean()
        yield
        session.run.loss = original

    result = attempt(trials, harmless)
    assert (result.status, "nothing to agree with" in result.reason) == ("failed", True)


@pytest.mark.parametrize("raised", [MemoryError("no room"), AssertionError("half is wanted")])
def test_a_reference_that_cannot_run_is_not_called_non_finite(raised):
    def loss(m, x):
        made = m(x)
        if made.dtype is torch.float32:
            raise raised
        return made.float().mean()

    trials = trials_of(session_of(loss=loss))
    result = attempt(trials, change.compute_dtype("bf16"))
    assert trials.reference() is None
    assert str(raised) in trials.unable or isinstance(raised, MemoryError)
    assert (result.status, "fp32 cannot be run here" in result.reason) == ("failed", True)


def test_a_change_that_stands_in_is_made_in_the_reference_too_where_fp32_alone_fails():
    session = session_of(loss=lambda m, x: (m(x).float() * 0).log().mean())

    @contextmanager
    def fix_scaler_misuse(session):
        original, session.run.loss = session.run.loss, lambda m, x: m(x).float().mean()
        yield
        session.run.loss = original

    result = attempt(trials_of(session), fix_scaler_misuse, stands_in=True)
    assert (result.status, result.reason) == ("intervention", None)


def prescription(value, status):
    return Prescription(kind="code", value=value, status=status)


def test_the_first_cure_carries_what_failed_before_it():
    made = []

    def attempts():
        for value, status in (("a", "failed"), ("b", "worse"), ("c", "verified"), ("d", "verified")):
            made.append(value)
            yield prescription(value, status)

    cure = first_cure(attempts())
    assert cure.value == "c"
    assert [one.value for one in cure.alternatives] == ["a", "b"]
    assert made == ["a", "b", "c"], "what comes after a cure is not tried"
    none = first_cure(iter([prescription("a", "failed"), prescription("b", "failed")]))
    assert (none.value, [one.value for one in none.alternatives]) == ("a", ["b"])
    assert first_cure(iter(())) is None
