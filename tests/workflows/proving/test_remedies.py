"""Remedies: the smallest set of modules, in few replays; interventions where only the code can be changed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from ampdoctor.reports.fix_code import Code, code_of, setting_of
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows.test_smallest_set import trials_bound

FILE = "tests/workflows/proving/remedies.py"
FIRST = 3
"""Runs of the bad step beside the trials: the one that fires, the one that is traced, the one in fp32."""


@lru_cache
def source():
    return Path(FILE).read_text(encoding="utf-8").splitlines()


def line_of(mark):
    return next(i for i, text in enumerate(source(), 1) if text.endswith(f"# {mark}"))


def replay(name, **arguments):
    return bisect_nan(ReplayRequest(factory=f"{FILE}:{name}", arguments=arguments, steps=6))


@pytest.mark.parametrize(("loud", "kind"), [((4,), "chain"), ((1, 9), "branches"), ((6, 7, 8), "chain")], ids=str)
def test_the_smallest_set_of_modules_is_found_in_few_replays(kind, loud):
    report = replay("stack", kind=kind, layers=12, loud=list(loud))
    first = report.findings[0]
    cure = first.prescription
    assert (cure.kind, cure.status) == ("fp32_modules", "verified")
    assert cure.value == [f"layers.{i}" for i in loud]
    assert first.where.module == f"layers.{loud[0]}"
    used = report.run["bad_step_replays"]
    if len(loud) == 1:
        assert used <= 3 + 1, "fires, is traced, is cured, and once in fp32"
    else:
        assert "none can be left out" in cure.reason
        assert used <= trials_bound(12, len(loud)) + FIRST


def test_independent_culprits_are_findings_of_their_own_and_share_their_cure():
    report = replay("stack", kind="branches", layers=5, loud=[1, 3])
    assert [f.where.module for f in report.findings] == ["layers.1", "layers.3"]
    assert len({f.fingerprint for f in report.findings}) == 2
    assert {f.severity for f in report.findings} == {"error"}
    assert report.findings[0].prescription == report.findings[1].prescription
    assert all(f.where.source.line == line_of("LOUD") for f in report.findings)


def test_many_culprits_are_capped_and_the_rest_is_listed():
    report = replay("stack", kind="branches", layers=12, loud=list(range(12)))
    assert len(report.findings) == 8
    assert report.findings[0].evidence["also_count"] == 11


@pytest.mark.parametrize(
    ("name", "mark", "words"),
    [
        ("log_of_zero", "LOG", "away from zero"),
        ("exp_beyond_fp32", "EXP", "log space"),
        ("norm_of_a_zero_row", "NORM", "the input of torch.sqrt at least 1e-06 away from zero, e.g. x.clamp_min("),
        ("nothing_counted_after_the_step", "COUNTED", "away from zero"),
        ("smoothing_over_a_mask", "SMOOTHED", "clamp the input of torch."),
        ("rounded_on_another_line", "ROUNDED", "compute this line in fp32"),
    ],
)
def test_what_only_the_code_can_change_is_tried_at_its_line(name, mark, words):
    finding = replay(name).findings[0]
    cure = finding.prescription
    assert (cure.kind, cure.status, cure.reason) == ("code", "intervention", None)
    assert f"remedies.py:{line_of(mark)}:" in cure.value
    assert words in cure.value
    assert "aten." not in cure.value


@pytest.mark.parametrize("name", ["nothing_counted_after_the_step", "entropy_of_a_mask"])
def test_no_batch_and_no_precision_is_offered_for_what_the_code_writes(name):
    """One batch alone shows it, and fp32 shows it as well."""
    finding = replay(name).findings[0]
    offered = (finding.prescription, *finding.prescription.alternatives)
    assert {change.kind for change in offered} == {"code"}
    assert finding.cause == "invalid_op"


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_of_a_model_that_is_mostly_frozen_what_is_trained_goes_to_fp32_alone(half):
    """fp16: Adam's epsilon is flushed; bf16: every update is below half a unit in the last place."""
    (finding,) = replay("adapter", half=half, trained=half).findings
    assert (finding.code, finding.prescription.status) == ("AMP501", "intervention")
    assert finding.prescription.value.startswith("keep the parameters that are trained in fp32, and the frozen ones")
    assert not replay("adapter", half=half, trained="fp32").findings


def test_in_a_model_that_is_half_throughout_the_result_is_half_again():
    cure = replay("pure_half_exp").findings[0].prescription
    (tried,) = [one for one in cure.alternatives if one.kind == "code"]
    assert (cure.kind, cure.status, tried.status) == ("dtype", "verified", "failed")
    assert "away from fp32's" in tried.reason, "it ran, and half cannot hold the result"


def test_what_teaches_nothing_in_one_step_does_not_speak_against_a_guard():
    """Equal rewards in batch 3: their spread is 0, and so is every gradient once that is guarded."""
    finding = replay("equal_rewards").findings[0]
    assert (finding.cause, finding.where.step) == ("invalid_op", 3)
    assert finding.prescription.status == "intervention"
    assert "away from zero" in finding.prescription.value


def test_a_step_past_the_scaler_that_overflows_is_put_right_at_a_lower_scale():
    finding = replay("steps_past_an_overflow").findings[0]
    assert (finding.cause, finding.prescription.status) == ("scaler_misuse", "intervention")
    assert "a loss scale of" in finding.prescription.detail


def test_a_loss_that_is_scaled_by_hand_gets_a_lower_scale():
    report = replay("scales_by_hand")
    finding = report.findings[0]
    assert (finding.cause, finding.prescription.kind) == ("grad_overflow", "init_scale")
    assert finding.prescription.verified
    assert 1.0 <= finding.prescription.value < 2.0**20
    assert code_of(finding.prescription, setting_of(report)) == Code()  # there is no scaler that it could be given to
    assert next_step(report).said.startswith("scale the loss by 4096 in place of 1048576")


@pytest.mark.parametrize("what", ["weight", "running", "moment"])
def test_broken_state_is_replaced_and_the_rest_of_the_run_shown_to_be_well(what):
    finding = replay("broken", what=what).findings[0]
    assert finding.cause == "bad_checkpoint"
    assert (finding.prescription.kind, finding.prescription.status) == ("code", "intervention")
    assert finding.where.tensor in finding.prescription.value
