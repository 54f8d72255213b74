"""Every labelled run, under both policies: the label's step, phase, module, op, kind of value and cause."""

from __future__ import annotations

import json

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.opening.request import ReplayRequest
from ampdoctor.workflows.scan import scan
from fixtures.corpus import runs
from tests.corpus.judging import disagreements, remedied, worst_finding

FACTORY = "fixtures/corpus/runs.py:make_run"
POLICIES = ("cuda", "native")
CASES = runs.case_ids()
HEALTHY = [case for case in CASES if runs.label(case)["kind"] == "healthy"]
SICK = [case for case in CASES if case not in HEALTHY]

# libraries of the corpus speak up while their models are built; none of it is ours
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def diagnosed(case, policy, tmp_path):
    checkpoint = None
    if runs.has_checkpoint(case):
        checkpoint = str(tmp_path / "checkpoint.pt")
        runs.write_checkpoint(case, checkpoint)
    request = ReplayRequest(factory=FACTORY, arguments={"case": case}, policy=policy, checkpoint=checkpoint)
    return bisect_nan(request)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", SICK)
def test_a_sick_run_is_diagnosed_as_labelled(case, policy, tmp_path):
    report = diagnosed(case, policy, tmp_path)
    assert report.verdict == "sick"
    assert disagreements(case, report, policy) == [], worst_finding(report).message
    assert remedied(case, report), worst_finding(report).prescription


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_raises_no_alarm(case, policy, tmp_path):
    report = diagnosed(case, policy, tmp_path)
    assert report.findings == ()
    assert report.verdict == "healthy"
    assert report.complete


@pytest.mark.parametrize("case", [case for case in SICK if "fp32_modules" in runs.label(case)["fixed_by"]])
def test_the_labelled_module_in_fp32_is_a_verified_cure(case, tmp_path):
    prescription = worst_finding(diagnosed(case, "native", tmp_path)).prescription
    assert (prescription.kind, prescription.value) == ("fp32_modules", runs.label(case)["fixed_by"]["fp32_modules"])
    assert prescription.verified


@pytest.mark.parametrize("case", [case for case in SICK if runs.label(case)["kind"] == "bad_checkpoint"])
def test_a_bad_checkpoint_is_found_by_scan_alone(case, tmp_path):
    path = tmp_path / "checkpoint.pt"
    runs.write_checkpoint(case, path)
    finding = worst_finding(scan(str(path)))
    label = runs.label(case)
    assert finding.cause == "bad_checkpoint"
    assert finding.where.module == label["culprit_module"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("t5_ffn_wo_overflow", 1),
        ("minibatch_stddev_eps", 1),
        ("grad_underflow_no_scaler", 1),
        ("healthy_gpt_neg_inf_mask", 0),
        ("healthy_initial_scale_skips", 0),
    ],
)
def test_as_a_process(case, code, run_cli, check_report):
    argument = f"case={json.dumps(case)}"
    done = [run_cli("bisect-nan", FACTORY, "--arg", argument, "--format", "json") for _ in range(2)]
    assert [one.returncode for one in done] == [code, code], done[0].stderr
    assert done[0].stdout == done[1].stdout, "two runs must be byte-identical"
    report = check_report(done[0].stdout)
    assert report["verdict"] == ("sick" if code else "healthy")
