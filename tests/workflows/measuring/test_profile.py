from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ampdoctor import TrainingRun
from ampdoctor.errors import AmpdoctorError, UserCodeError
from ampdoctor.reports.github import render_markdown
from ampdoctor.reports.html_report import render_html
from ampdoctor.reports.human import render_human
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.measure import manual_loss_scale
from ampdoctor.workflows.profile import profile
from ampdoctor.workflows.requests import ReplayRequest
from tests.corpus.reports import HEALTHY, of_case, profiled, sort_of

ROOT = Path(__file__).parents[3]
RUNS = str(Path(__file__).parent / "ranges_runs.py")


def of_run(name, *, options=None, **arguments):
    return profile(ReplayRequest(factory=f"{RUNS}:{name}", arguments=arguments, device="cpu", **(options or {})))


def in_a_terminal(report):
    console = Console(file=io.StringIO(), width=120)
    render_human(report, console)
    return console.file.getvalue()


def site(report, name, kind, part="output"):
    return next(s for s in report.profile["sites"] if (s["name"], s["kind"], s["part"]) == (name, kind, part))


QUICK = ("healthy_dead_relu_zero_grads", "healthy_initial_scale_skips")
"""Healthy cases that other tests ask for as well; the others with the slow tests."""


@pytest.mark.each_value_once(of=lambda case: {sort_of(case)})
@pytest.mark.parametrize("case", [of_case(case, slow=case not in QUICK) for case in HEALTHY])
def test_a_healthy_run_has_no_error_and_no_warning(case, check_report):
    report = profiled(case)
    assert report.verdict == "healthy"
    assert report.complete
    assert {f.severity for f in report.findings} <= {"note"}
    check_report(render_json(report))


@pytest.mark.xdist_group("grad_underflow_no_scaler")
def test_the_headline_is_fp16_against_bf16(check_report):
    report = profiled("grad_underflow_no_scaler")
    summary = report.profile["summary"]
    for kind in ("activation_grad", "weight_grad"):
        assert summary["fp16"][kind]["flushed"] > 0.9
        assert summary["bf16"][kind]["flushed"] == 0.0
        assert 1.2e-3 < summary["bf16"][kind]["relative_error"] < 2e-3
    assert [f.code for f in report.findings] == ["AMP301"]
    assert report.verdict == "sick"
    check = next(c for c in report.checks if c.name == "activation grad underflow, fp16 against bf16")
    assert check.headroom["fp16"] == summary["fp16"]["activation_grad"]["flushed"]
    check_report(render_json(report))
    assert site(report, "rays", "activation_grad")["formats"]["fp16"]["flushed"] > 0.9


@pytest.mark.xdist_group("scale_collapsed_then_underflow")
def test_figures_are_given_at_the_runs_scale_and_at_one():
    report = profiled("scale_collapsed_then_underflow")
    summary = report.profile["summary"]
    assert summary["fp16"]["activation_grad"]["flushed"] > 0.9
    assert summary["fp16_unscaled"]["activation_grad"]["flushed"] < 1e-3
    assert report.profile["loss_scale"] == 2.0**-18


@pytest.mark.parametrize(
    ("loss", "verdict"), [(lambda out: (out / 0).mean(), "sick"), (lambda out: 0 * out.mean(), "healthy")]
)
def test_gradients_that_are_all_zero_or_not_finite_are_not_measured_which_is_not_a_perfect_score(
    loss, verdict, check_report
):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        batches = [torch.randn(4, 4) for _ in range(3)]
        return TrainingRun(model=model, batches=batches, loss=lambda m, b: loss(m(b)), precision="fp16", scaler={})

    report = profile(ReplayRequest(factory=make))
    assert report.verdict == verdict
    check_report(render_json(report))
    gradients = [one["formats"] for one in report.profile["sites"] if one["kind"].endswith("_grad")]
    figures = [figure for part in (*report.profile["summary"].values(), *gradients) for figure in part.values()]
    assert {figure[key] for figure in figures for key in ("flushed", "overflowed", "relative_error")} == {None}
    checks = [check for check in report.checks if "underflow" in check.name]
    assert [(check.result, check.headroom) for check in checks] == [
        ("not measured: no such gradient is finite and nonzero", {})
    ] * 2
    for said in (render_markdown(report), render_html(report), in_a_terminal(report)):
        assert "ot measured: no gradient of a half tensor is finite and nonzero" in said
        assert not [line for line in said.splitlines() if "0.00%" in line and (" dA " in line or " dW " in line)]


@pytest.mark.xdist_group("healthy_dead_relu_zero_grads")
def test_true_zeros_are_not_underflow():
    report = profiled("healthy_dead_relu_zero_grads")
    found = site(report, "fc2.weight", "weight_grad", "parameter")
    assert found["formats"]["fp16"]["zeros"] > 0.5
    assert found["formats"]["fp16"]["flushed"] < 1e-3
    assert found["zeros"] / found["numel"] == pytest.approx(found["formats"]["fp16"]["zeros"])
    sparse = profiled("healthy_sparse_embedding")
    assert site(sparse, "user.weight", "weight_grad", "parameter")["formats"]["fp16"]["zeros"] > 0.9


def test_what_autocast_keeps_in_fp32_is_not_in_the_summary():
    report = of_run("tied")
    assert not site(report, "block.norm", "activation_grad")["half"]
    assert site(report, "block.down", "activation_grad")["half"]


@pytest.mark.xdist_group("static_loss_scale_overflow")
def test_magnitudes_are_those_of_the_unscaled_loss():
    report = profiled("static_loss_scale_overflow")
    assert report.profile["loss_scale"] == 65536.0
    head = site(report, "head", "activation_grad")
    assert head["amax"] <= 1.0  # p - y of a summed cross-entropy
    assert head["amax_by_step"][0] > 1000.0
    assert any("multiplies its loss by 65536" in note for note in report.run["notes"])


@pytest.mark.xdist_group("nan_pixel_in_batch")
def test_fp32_that_is_not_finite_is_said_first():
    report = profiled("nan_pixel_in_batch")
    assert [f.code for f in report.findings] == ["AMP206"]
    assert report.verdict == "sick"


def test_steps_are_as_many_as_asked_or_as_there_are():
    assert of_run("tied", steps=4, options={"steps": 3}).run["steps"] == 3
    assert of_run("tied", steps=2).run["steps"] == 2


@pytest.mark.parametrize(("run", "sentence"), [("nothing_learns", "no gradient"), ("no_batch", "no batch")])
def test_a_run_without_gradients_is_refused(run, sentence):
    with pytest.raises(AmpdoctorError) as caught:
        of_run(run)
    assert sentence in str(caught.value)
    assert not isinstance(caught.value, UserCodeError)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([65536.0, 65540.0], 65536.0),
        ([1000.0, 1000.0], 1000.0),
        ([1.0, 1.0], 1.0),
        ([2.0, 3.0, 2.5], 1.0),  # clipping
        ([512.0], 1.0),  # one step may have been clipped
        ([None, 512.0, 512.0], 1.0),
    ],
)
def test_only_a_constant_factor_is_a_scale_made_by_hand(factors, expected):
    assert manual_loss_scale(factors) == expected
