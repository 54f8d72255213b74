"""The scaler's protocol: no alarm where a step keeps to it in its own way, the right call where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.errors import UserCodeError
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


def diagnose(name, **arguments):
    return bisect_nan(ReplayRequest(factory=f"tests.workflows.proving.protocols:{name}", arguments=arguments))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("accumulates", {"zeroed_in_place": True}),
        ("accumulates", {"fused": True}),
        ("adversaries", {}),
        ("two_losses", {}),
        ("two_losses", {"by_hand": True}),
        ("scaled_twice", {"divided": True}),
        ("regularised_after_unscaling", {}),
        ("gradient_penalty", {}),
        ("cached_gradients", {}),
        ("scaled_by_another", {"how": "same"}),
        ("never_comes_down", {"how": "not_updated", "scale": 1024.0}),
        ("stepped_again", {"how": "another_backward"}),
        ("stepped_again", {"how": "where_skipped"}),
    ],
)
def test_a_step_that_keeps_to_the_protocol(name, arguments):
    report = diagnose(name, **arguments)
    assert [finding.message for finding in report.findings] == []
    assert (report.verdict, report.complete) == ("healthy", True)
    assert report.checks[-1].result == "ok"


@pytest.mark.parametrize(
    ("name", "arguments", "op"),
    [
        ("unscaled_early", {}, "scaler.unscale_"),
        ("one_loss_unscaled", {}, "backward"),
        ("one_loss_unscaled", {"fused": True}, "backward"),
        ("edited_while_scaled", {"divides": True, "clips": True}, "unscale"),
        ("edited_while_scaled", {"clips": True}, "clip_grad_norm_"),
        ("edited_while_scaled", {"hooks": True}, "Tensor.grad"),
        ("edited_while_scaled", {"ascends": True}, "Tensor.grad"),
        ("scaled_twice", {}, "GradScaler.scale"),
        ("critic_not_cleared", {}, "optimizer.zero_grad"),
        ("scaled_by_another", {"how": "two"}, "scaler.step"),
        ("scaled_by_another", {"how": "before"}, "scaler.step"),
        ("scaled_by_another", {"how": "within", "fused": True}, "scaler.step"),
        ("gradient_penalty", {"unscaled": False, "scale": 64.0}, "autograd.grad"),
    ],
)
def test_a_step_that_breaks_it(name, arguments, op):
    report = diagnose(name, **arguments)
    (finding,) = report.findings
    assert (finding.code, finding.cause, finding.severity) == ("AMP407", "scaler_misuse", "error")
    assert (finding.where.step, finding.where.phase, finding.where.op) == (0, "optimizer", op)
    assert finding.prescription.status == "intervention"
    assert report.verdict == "sick"


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        ({"how": "by_the_scaler"}, 0),
        ({"how": "by_hand", "overflow_at": 2}, 0),
        ({"how": "where_skipped", "overflow_at": 2}, 2),
    ],
)
def test_a_second_step_on_the_same_gradients_is_named_and_no_other_change_is_called_a_cure(arguments, step):
    report = diagnose("stepped_again", **arguments)
    (finding,) = report.findings
    assert (finding.code, finding.severity, report.verdict) == ("AMP407", "error", "sick")
    assert (finding.where.step, finding.where.op) == (step, "optimizer.step")
    lines = Path(__file__).with_name("protocols.py").read_text(encoding="utf-8").splitlines()
    assert lines[finding.where.source.line - 1].endswith("# AGAIN")
    assert ("has skipped" in finding.message) == (step == 2)
    assert "remove the second call" in finding.prescription.value
    assert (finding.prescription.status, finding.prescription.alternatives) == ("not_run", ())


def test_what_else_is_wrong_with_a_step_is_not_blamed_on_its_calls():
    report = diagnose("cached_gradients", factor=1e-7, scale=4.0)
    assert [finding.cause for finding in report.findings] == ["grad_underflow"]
    assert report.findings[0].prescription.status == "verified"


@pytest.mark.parametrize(
    ("how", "op", "mark", "words", "advice"),
    [
        ("unscaled", "scaler.step", "STEP", "_scale is None", "scaler.scale(loss).backward()"),
        ("twice", "scaler.unscale_", "TWICE", "already been called", "once, after the last micro-batch's backward"),
        ("past_it", "optimizer.step", "PAST", "No inf checks", "in place of optimizer.step()"),
        ("half", "scaler.step", "HALF", "4 trained parameters are in fp16", "no model.half()"),
        ("no_gradients", "scaler.step", "STEP", "No inf checks", "whose parameters got gradients"),
    ],
)
def test_a_call_that_torch_refuses_is_named_with_its_line(how, op, mark, words, advice):
    (finding,) = diagnose("refused", how=how).findings
    assert (finding.code, finding.cause, finding.severity) == ("AMP407", "scaler_misuse", "error")
    assert (finding.where.step, finding.where.phase, finding.where.op) == (0, "scaler", op)
    assert finding.where.source.file.endswith("protocols.py")
    lines = Path(__file__).with_name("protocols.py").read_text(encoding="utf-8").splitlines()
    assert lines[finding.where.source.line - 1].endswith(f"# {mark}")
    assert words in finding.message
    assert advice in finding.prescription.value
    assert finding.prescription.status == "not_run"


def test_an_optimizer_that_raises_by_itself_is_a_mistake_of_the_users_code():
    with pytest.raises(UserCodeError, match="AssertionError: out of order"):
        diagnose("refused", how="its_own")


@pytest.mark.parametrize("how", ["anew", "not_updated"])
def test_a_scaler_that_never_comes_down(how):
    report = diagnose("never_comes_down", how=how)
    (finding,) = report.findings
    assert (finding.cause, finding.severity, finding.where.step) == ("grad_overflow", "error", 0)
    assert (finding.prescription.kind, finding.prescription.status) == ("init_scale", "verified")
    assert finding.prescription.value < 2.0**24
    assert ("scaler.update() is never called" in finding.help) == (how == "not_updated")
    assert any(check.result == "8 of 8" for check in report.checks)
