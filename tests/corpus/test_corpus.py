"""Every labelled run: the label's step, phase, module, op, kind of value and cause, under CUDA's policy.

The first of each kind is looked at with each `make test`, the rest with the slow tests.
Where CUDA's casts move what the label says, the CPU's own policy is looked at as well; elsewhere a slow test does.
CI asks for each kind of cause in each architecture, and for both policies of each kind.
"""

from __future__ import annotations

import json

import pytest

from ampdoctor.workflows.scan import scan
from fixtures.corpus import runs
from tests.corpus.judging import disagreements, remedied, worst_finding
from tests.corpus.reports import (
    FACTORY,
    HEALTHY,
    MORE_OF_A_KIND,
    NOT_FOUND_YET,
    SICK,
    diagnosed,
    of_case,
    policies,
    sort_and_policy,
    takes_seconds,
)
from tests.reports.three_forms import FORMS, unclear, unsaid

CASTING = ("same", "moves")
"""What a label says of CUDA's policy where its run casts at all."""

# libraries of the corpus speak up while their models are built; none of it is ours
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def each(cases):
    """Each case under its policies; the CPU's own where nothing moves under CUDA's runs with the slow ones.

    Quick are the first of each kind, phase and number: what else there is of them differs in its architecture.
    """
    first = {}
    for case in cases:
        if case not in MORE_OF_A_KIND and not takes_seconds(case):
            label = runs.label(case)
            first.setdefault((label["kind"], label["phase"], label["nonfinite"]), case)
    quick = [of_case(case, policy, slow=case not in first.values()) for case in cases for policy in policies(case)]
    casting = [case for case in cases if runs.label(case)["cuda_policy"] in CASTING]
    return quick + [of_case(case, "native", slow=True) for case in casting if "native" not in policies(case)]


@pytest.mark.each_value_once(of=sort_and_policy)
@pytest.mark.parametrize(("case", "policy"), each(SICK))
def test_a_sick_run_is_diagnosed_as_labelled(case, policy):
    report = diagnosed(case, policy)
    assert report.verdict == "sick"
    assert disagreements(case, report, policy) == [], worst_finding(report).message
    assert remedied(case, report), worst_finding(report).prescription
    assert [unsaid(report, form) for form in FORMS] == [[], [], []]
    assert unclear(report) == []


@pytest.mark.each_value_once(of=sort_and_policy)
@pytest.mark.parametrize(("case", "policy"), each(HEALTHY))
def test_a_healthy_run_raises_no_alarm(case, policy):
    report = diagnosed(case, policy)
    assert report.findings == ()
    assert report.verdict == "healthy"
    assert report.complete


@pytest.mark.parametrize("case", [of_case(case) for case in NOT_FOUND_YET])
def test_what_is_listed_as_not_found_yet_is_not(case):
    report = diagnosed(case)
    if runs.label(case)["kind"] == "healthy":
        found = not report.findings and report.verdict == "healthy"
    else:
        found = not disagreements(case, report, "cuda") and remedied(case, report)
    assert not found, f"take {case} off {runs.NOT_FOUND_YET.name}"


@pytest.mark.parametrize(
    "case", [of_case(case, slow=takes_seconds(case)) for case in SICK if "fp32_modules" in runs.label(case)["fixed_by"]]
)
def test_the_labelled_module_in_fp32_is_a_verified_cure(case):
    prescription = worst_finding(diagnosed(case, policies(case)[-1])).prescription
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
@pytest.mark.parametrize(("case", "code"), [("t5_ffn_wo_overflow", 1), ("healthy_initial_scale_skips", 0)])
def test_as_a_process(case, code, run_cli, check_report):
    argument = f"case={json.dumps(case)}"
    done = [run_cli("bisect-nan", FACTORY, "--arg", argument, "--format", "json") for _ in range(1 + code)]
    assert {one.returncode for one in done} == {code}, done[0].stderr
    assert len({one.stdout for one in done}) == 1, "two runs must be byte-identical"
    report = check_report(done[0].stdout)
    assert report["verdict"] == ("sick" if code else "healthy")
