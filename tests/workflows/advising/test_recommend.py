from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.evidence.report import Prescription
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.reports.human import plain_text
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.profile import read_profile, write_profile
from ampdoctor.workflows.recommend import one_answer, recommend, recommend_from_file
from ampdoctor.workflows.requests import ReplayRequest
from fixtures.corpus import runs
from tests.corpus.reports import FACTORY, HEALTHY, of_case, recommended, saved_profile, sort_of
from tests.samples import SICK, UNDERFLOW

ROOT = Path(__file__).parents[3]
RUNS = str(Path(__file__).parents[1] / "measuring" / "ranges_runs.py")


QUICK = (
    "healthy_bf16_beyond_fp16",
    "healthy_dead_relu_zero_grads",
    "healthy_initial_scale_skips",
    "healthy_sparse_embedding",
)
"""Healthy cases of which other tests look at the same report, and one; the others are looked at with the slow tests."""


def for_case(case, **options):
    if not options:
        return recommended(case)
    return recommend(ReplayRequest(factory=FACTORY, arguments={"case": case}, device="cpu", **options))


def for_run(name, *, options=None, **arguments):
    return recommend(ReplayRequest(factory=f"{RUNS}:{name}", arguments=arguments, device="cpu", **(options or {})))


def codes(report):
    return [f.code for f in report.findings]


@pytest.mark.each_value_once(of=lambda case: {sort_of(case)})
@pytest.mark.parametrize("case", [of_case(case, slow=case not in QUICK) for case in HEALTHY])
def test_a_healthy_run_keeps_what_it_has(case, check_report):
    report = for_case(case)
    assert report.verdict == "healthy"
    assert report.complete
    assert not {f.severity for f in report.findings} & {"error", "warning"}
    assert report.scaler.change is False
    check_report(render_json(report))


@pytest.mark.xdist_group("grad_underflow_no_scaler")
def test_underflow_without_a_scaler(check_report):
    report = for_case("grad_underflow_no_scaler")
    assert codes(report) == ["AMP301"]
    finding = report.findings[0]
    assert finding.cause == "grad_underflow"
    assert finding.prescription.kind == "scaler"
    assert finding.prescription.verified
    assert report.scaler.change
    assert report.scaler.current is None
    assert 2.0**14 <= report.scaler.recommended.init_scale <= 2.0**30
    assert report.scaler.recommended.growth_interval == 2000
    assert finding.evidence["now"]["activation_grad"] > 0.9
    assert report.scaler.observed.flushed.activation_grad < 1e-2
    assert report.scaler.observed.skip_rate == report.scaler.predicted.skip_rate == 0.0
    paths, figures = report.scaler.trajectory, report.scaler.simulated
    assert paths.current is None  # the run has no scaler
    assert paths.recommended.points[0] == (0, report.scaler.recommended.init_scale)
    assert figures.recommended.skips[0] <= paths.recommended.skipped <= figures.recommended.skips[2]
    assert report.scaler.recommended.init_scale <= min(limit for _, limit in paths.limit)
    check_report(render_json(report))


@pytest.mark.xdist_group("scale_collapsed_then_underflow")
def test_a_collapsed_scale_is_brought_back(check_report):
    report = for_case("scale_collapsed_then_underflow")
    assert codes(report) == ["AMP301"]
    finding = report.findings[0]
    assert (finding.prescription.kind, finding.prescription.status) == ("init_scale", "verified")
    assert finding.prescription.value == report.scaler.recommended.init_scale
    assert 2.0**8 <= finding.prescription.value <= 2.0**20
    assert finding.evidence["now"]["weight_grad"] > 0.5
    assert finding.evidence["with_the_change"]["weight_grad"] < 1e-3
    check_report(render_json(report))


@pytest.mark.xdist_group("no_valid_scale_collapse")
def test_where_no_scale_of_at_least_one_fits_bf16_is_the_advice(check_report):
    report = for_case("no_valid_scale_collapse")
    assert codes(report) == ["AMP406"]
    prescription = report.findings[0].prescription
    assert (prescription.kind, prescription.value, prescription.status) == ("dtype", "bfloat16", "verified")
    assert report.findings[0].cause == "scaler_collapse"
    assert report.scaler.recommended is None
    check_report(render_json(report))


@pytest.mark.xdist_group("static_loss_scale_overflow")
def test_a_scale_made_by_hand_is_too_high(check_report):
    report = for_case("static_loss_scale_overflow")
    assert codes(report) == ["AMP405"]
    assert report.scaler.current == {"scale": 65536.0, "by_hand": True}
    assert 2.0**8 <= report.scaler.recommended.init_scale <= 2.0**11
    prescription = report.findings[0].prescription
    assert (prescription.kind, prescription.status) == ("init_scale", "intervention")
    assert prescription.value == report.scaler.recommended.init_scale
    assert report.scaler.observed.relative_error < 1e-2
    check_report(render_json(report))


def test_outside_fp16_no_scaler_is_needed(check_report):
    report = for_run("tied", options={"precision": "bf16"})
    assert report.verdict == "healthy"
    assert report.scaler == ScalerSection()
    assert any(c.name == "loss scaling" and "not needed" in c.result for c in report.checks)
    check_report(render_json(report))


def test_a_dead_scaler_in_a_checkpoint(tmp_path, check_report):
    path = tmp_path / "c.pt"
    runs.write_checkpoint("scaler_state_zero_checkpoint", path)
    report = for_case("scaler_state_zero_checkpoint", checkpoint=str(path))
    assert codes(report) == ["AMP401"]
    assert report.findings[0].prescription.verified
    assert report.scaler.current["scale"] == 0.0
    check_report(render_json(report))


def test_modules_that_no_scale_serves_go_to_fp32(check_report):
    report = for_run("two_worlds")
    finding = next(f for f in report.findings if f.code == "AMP303")
    assert finding.evidence["modules"] == ["quiet"]  # half of the parameters: too many for islands, and none overflows
    assert finding.severity == "warning"
    assert (finding.prescription.kind, finding.prescription.status) == ("dtype", "verified")
    check_report(render_json(report))


def test_a_small_module_that_no_scale_serves_is_an_island():
    report = for_run("two_worlds", wide=64, options={"emit": "torch"})
    finding = next(f for f in report.findings if f.code == "AMP303")
    assert finding.evidence["modules"] == ["quiet"]
    assert (finding.prescription.kind, finding.prescription.value) == ("fp32_modules", ["quiet"])
    assert finding.prescription.verified
    assert report.precision.precision == "fp16"
    assert '["quiet"]' in report.scaler.emit.text


def test_noise_in_a_key_bias_changes_nothing():
    report = for_run("key_bias")
    assert "AMP303" not in codes(report)
    assert report.scaler.change is False


def saved(tmp_path, case):
    path = tmp_path / "p.ampprofile"
    path.write_bytes(saved_profile(case))
    return str(path)


def from_file(path):
    return recommend_from_file(path, ReplayRequest(factory=path))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        of_case("grad_underflow_no_scaler", ["AMP301"]),
        of_case("no_valid_scale_collapse", ["AMP406"], slow=True),
        of_case("static_loss_scale_overflow", ["AMP405"], slow=True),
        of_case("healthy_dead_relu_zero_grads", []),
    ],
)
def test_a_saved_profile_gives_the_same_settings(case, expected, tmp_path, check_report):
    read = from_file(saved(tmp_path, case))
    from_run = for_case(case)
    assert codes(read) == expected
    assert read.scaler.change == from_run.scaler.change
    assert read.scaler.recommended == from_run.scaler.recommended
    assert read.scaler.observed is None
    assert all(f.prescription is None or f.prescription.status == "not_run" for f in read.findings)
    assert any(s.what == "replay" for s in read.skipped)
    check_report(render_json(read))


@pytest.mark.xdist_group("nan_pixel_in_batch")
def test_ranges_of_a_run_that_is_not_finite_give_no_settings(tmp_path):
    report = from_file(saved(tmp_path, "nan_pixel_in_batch"))
    assert codes(report) == ["AMP206"]
    assert report.scaler.recommended is None


def test_a_dead_scaler_of_a_profile_is_read_as_it_was_written(tmp_path):
    path = saved(tmp_path, "healthy_dead_relu_zero_grads")
    ranges = read_profile(path)
    dead = {"scale": math.nan, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    write_profile(path, replace(ranges, run=replace(ranges.run, scaler=dead)))
    report = from_file(path)
    assert report.scaler.change
    assert report.scaler.recommended.init_scale >= 1


def test_a_run_that_converges_is_left_alone(check_report):
    report = for_run("converging", options={"thresholds": thresholds_from({"AMP723": {"horizon": 1_000}})})
    assert report.verdict == "healthy"
    assert report.findings == ()
    assert report.scaler.change is False
    check_report(render_json(report))


@pytest.mark.parametrize(
    ("run", "arguments", "framework", "words"),
    [
        ("tied", {"scale": None}, "torch", "torch.amp.GradScaler"),  # fp16 stays, so a scaler that fits
        ("odd_scaler", {"init_scale": 1024.0, "backoff_factor": 0.0}, "accelerate", "GradScalerKwargs"),
    ],
)
def test_what_is_emitted_is_what_is_to_be_used(run, arguments, framework, words, check_report):
    report = for_run(run, options={"emit": framework}, **arguments)
    emitted = report.scaler.emit
    assert emitted.framework == framework
    assert words in emitted.text
    used = {} if report.scaler.recommended is None else asdict(report.scaler.recommended)
    assert all(str(value) in emitted.text for value in used.values())
    check_report(render_json(report))


def test_the_hardware_decides_over_the_precision():
    emitted = {"emit": "deepspeed", "precision": "bf16"}
    old, new = (for_run("tied", options={"target": target, **emitted}) for target in ("v100", "a100"))
    assert old.precision.precision == "fp16"
    assert '"fp16": {\n    "enabled": true' in old.scaler.emit.text  # no native bf16 there
    assert new.precision.precision == "bf16"
    assert '"bf16": {' in new.scaler.emit.text


@pytest.mark.xdist_group("healthy_initial_scale_skips")
def test_fewer_steps_left_make_the_skips_at_the_start_matter():
    few = for_case("healthy_initial_scale_skips", thresholds=thresholds_from({"AMP723": {"horizon": 100}}))
    many = for_case("healthy_initial_scale_skips")
    assert few.scaler.change
    assert few.scaler.observed.skip_rate == 0.0
    assert few.scaler.before.skip_rate == pytest.approx(3 / 8)
    assert not many.scaler.change  # a scaler that finds its level is left alone
    assert many.scaler.trajectory.recommended is None
    assert many.scaler.current["scale"] == many.scaler.recommended.init_scale == 65536.0
    assert many.scaler.observed.skip_rate == pytest.approx(3 / 8)


def test_a_step_that_both_scalers_skip_before_they_find_their_level():
    """What is said of the scaler, of the precision and in the finding agrees."""
    report = for_run("detour", options={"steps": 14})
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("AMP207", "note")
    assert "the scaler may only not have found its level" in finding.message
    assert (finding.prescription.kind, finding.prescription.status) == ("init_scale", "verified")
    assert finding.prescription.value < 2.0**16
    assert report.scaler.change is False
    assert report.scaler.recommended.init_scale == 2.0**16
    (said,) = [check.result for check in report.checks if check.name == "loss scale"]
    assert said == "no change needed: a change gains nothing measurable"
    assert report.precision.precision == "fp16", "a scaler that finds its level is no reason for another format"


UNSCALED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
opt = torch.optim.AdamW(model.parameters())
for it in range(8):
    x, y = torch.randn(64, 32), torch.randint(4, (64,))
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1e-5 * nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""


def test_where_a_finding_says_bf16_nothing_else_is_recommended(tmp_path, check_report):
    """The loop has no scaler that could be replaced: fp16 fits at 2^24, and only bf16 can be tried."""
    script = tmp_path / "train.py"
    script.write_text(UNSCALED, encoding="utf-8")
    report = recommend(ReplayRequest(factory=str(script), device="cpu", emit="torch"))
    (finding,) = report.findings
    assert (finding.code, finding.prescription.kind, finding.prescription.status) == ("AMP301", "dtype", "verified")
    assert report.precision is None
    assert (report.scaler.change, report.scaler.recommended) == (False, None)
    assert report.scaler.observed.flushed.weight_grad > 0.5
    assert "bfloat16" in report.scaler.emit.text
    assert [check.result for check in report.checks if check.name == "loss scale"] == ["as the finding's change says"]
    shown = plain_text(report)
    assert "init_scale" not in shown
    assert "is what the run has" not in shown
    assert next_step(report).said.startswith("paste the lines of the fix")
    check_report(render_json(report))


ADVICE = PrecisionAdvice(target="a100", precision="bf16", why="it fits")


@pytest.mark.parametrize(
    ("fix", "stays", "scale"),
    [
        ({"kind": "dtype", "value": "bfloat16"}, ADVICE, None),
        ({"kind": "dtype", "value": "float32"}, None, None),
        ({"kind": "scaler", "value": {"init_scale": 2.0**20}}, None, 2.0**20),
        ({"kind": "init_scale", "value": 2.0**16}, None, None),
        ({"kind": "fp32_modules", "value": ["head"]}, None, None),
        ({"kind": "fp32_modules", "value": ["head"], "detail": "with GradScaler(init_scale=1048576)"}, None, 2.0**20),
        ({"kind": "optimizer", "value": {"eps": 1e-5}}, ADVICE, 2.0**20),
    ],
)
def test_the_sections_say_what_a_verified_change_says(fix, stays, scale):
    finding = replace(UNDERFLOW, severity="error", prescription=Prescription(status="verified", **fix))
    report = replace(SICK, run={"precision": "fp16"}, findings=(finding,), precision=ADVICE)
    answer = one_answer(report)
    assert SICK.scaler.recommended.init_scale == 2.0**20
    assert answer.precision == stays
    assert answer.findings == (finding,)
    assert (answer.scaler.recommended.init_scale if answer.scaler.change else None) == scale


def test_an_untried_scaler_has_the_settings_of_the_run():
    usual = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    fix = Prescription(kind="scaler", value=usual, status="not_run", detail="GradScaler(init_scale=65536)")
    finding = replace(UNDERFLOW, severity="warning", prescription=fix)
    answer = one_answer(replace(SICK, run={"precision": "fp16"}, findings=(finding,)))
    assert answer.scaler == SICK.scaler
    assert answer.findings[0].prescription.value == asdict(SICK.scaler.recommended)
    assert answer.findings[0].prescription.detail.startswith("GradScaler(init_scale=1048576, growth_factor=2")


def test_a_step_that_both_scalers_skip_to_the_end():
    report = for_run("detour", options={"steps": 4}, binades=15, steps=4)
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("AMP207", "error")
    assert report.scaler.recommended is None
    (said,) = [check.result for check in report.checks if check.name == "loss scale"]
    assert said == "no loss scale helps"
    assert report.precision.precision == "bf16"
    assert "the gradients of step 0 are not finite with the recommended loss scale either" in report.precision.why
