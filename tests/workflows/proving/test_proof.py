"""The proof of a report: the replayed steps without and with the change, beside fp32."""

from __future__ import annotations

import pytest

from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.report import Prescription
from ampdoctor.evidence.report_replay import Proof, ReplayedStep
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.trials import AFTER, AGREEMENT, MOST_STEPS, STEPS_BEFORE, proof_section
from tests.corpus.reports import diagnosed, of_case, recommended

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def rows_of(proof, which):
    return {step["step"]: step[which] for step in proof["steps"] if step[which] is not None}


@pytest.mark.parametrize(
    "case", [*map(of_case, ["groupnorm_manual_square", "softmax_then_log", "static_loss_scale_overflow"])]
)
def test_a_verified_change_is_finite_in_the_bad_step_and_after_it_and_agrees_with_fp32(case, check_report):
    report = diagnosed(case)
    proof = check_report(render_json(report))["proof"]
    finding = report.findings[0]
    assert finding.prescription.status in ("verified", "intervention")
    assert (proof["fingerprint"], proof["kind"]) == (finding.fingerprint, finding.prescription.kind)
    assert proof["status"] == finding.prescription.status
    bad = finding.where.step
    changed, without, fp32 = (rows_of(proof, which) for which in ("with", "without", "fp32"))
    assert set(changed) >= set(range(bad, min(bad + AFTER + 1, report.run["steps"])))
    assert all(row["finite"] and not row["skipped"] for row in changed.values())
    assert without[bad]["finite"] is False
    assert all(row["finite"] for step, row in without.items() if step < bad)
    assert fp32[bad]["finite"]
    assert fp32[bad]["scale"] is None
    assert changed[bad]["gradient_norm"] == pytest.approx(fp32[bad]["gradient_norm"], rel=AGREEMENT)
    assert changed[bad]["loss"] == pytest.approx(fp32[bad]["loss"], rel=AGREEMENT)
    assert without[bad]["gradient_norm"] is None, "the first replay is a cheap one"


@pytest.mark.xdist_group("nan_pixel_in_batch")
def test_a_batch_that_is_left_out_has_no_step_with_the_change():
    report = diagnosed("nan_pixel_in_batch")
    bad = report.findings[0].where.step
    assert report.proof.kind == "skip_batch"
    changed = rows_of(to_plain(report.proof), "with")
    assert min(changed) == bad + 1
    assert all(row["finite"] for row in changed.values())
    assert rows_of(to_plain(report.proof), "without")[bad]["finite"] is False


@pytest.mark.xdist_group("grad_underflow_no_scaler")
def test_a_recommended_scaler_is_shown_over_the_whole_replay(check_report):
    report = recommended("grad_underflow_no_scaler")
    proof = check_report(render_json(report))["proof"]
    finding = report.findings[0]
    assert (proof["fingerprint"], proof["status"]) == (finding.fingerprint, "verified")
    changed, without, fp32 = (rows_of(proof, which) for which in ("with", "without", "fp32"))
    assert list(changed) == list(range(report.run["steps"]))
    assert changed[0]["scale"] == report.scaler.recommended.init_scale
    assert {row["scale"] for row in without.values()} == {None}
    assert sum(row["skipped"] for row in changed.values()) == 0
    assert fp32
    for step, row in fp32.items():
        assert changed[step]["gradient_norm"] == pytest.approx(row["gradient_norm"], rel=AGREEMENT)
        assert without[step]["gradient_norm"] < 0.9 * row["gradient_norm"], "most of the gradient is flushed"


# -- the section itself ------------------------------------------------------------------------------------------------


def rows(steps, loss=1.0):
    return tuple(
        ReplayedStep(step=step, loss=loss, scale=None, gradient_norm=2.0, skipped=False, finite=True) for step in steps
    )


def change_of(proof):
    return Prescription(kind="dtype", value="bfloat16", status="verified", proof=proof)


def test_the_steps_are_those_with_the_change_and_a_few_before_them():
    proof = Proof(without=rows(range(11)), changed=rows(range(8, 12), 2.0), fp32=rows([8], 3.0))
    section = to_plain(proof_section(change_of(proof), proof))
    assert [step["step"] for step in section["steps"]] == list(range(8 - STEPS_BEFORE, 12))
    at = {step["step"]: step for step in section["steps"]}
    assert (at[7]["without"]["loss"], at[7]["with"], at[7]["fp32"]) == (1.0, None, None)
    assert (at[8]["without"]["loss"], at[8]["with"]["loss"], at[8]["fp32"]["loss"]) == (1.0, 2.0, 3.0)
    assert (at[11]["without"], at[11]["with"]["loss"]) == (None, 2.0)
    assert section["omitted"] == 0


def test_a_long_replay_keeps_both_of_its_ends():
    proof = Proof(changed=rows(range(MOST_STEPS + 30)))
    section = to_plain(proof_section(change_of(proof), proof))
    shown = [step["step"] for step in section["steps"]]
    assert (len(shown), shown[0], shown[-1]) == (MOST_STEPS, 0, MOST_STEPS + 29)
    assert section["omitted"] == 30
