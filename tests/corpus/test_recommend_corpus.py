"""`recommend` on every labelled run: the label's cause with a cure that was shown, and no change for healthy ones."""

from __future__ import annotations

import pytest

from ampdoctor.workflows.opening.request import ReplayRequest
from ampdoctor.workflows.recommend import recommend
from fixtures.corpus import runs
from tests.corpus.judging import remedied, worst_finding

FACTORY = "fixtures/corpus/runs.py:make_run"
SCALING = ("grad_underflow", "grad_overflow", "scaler_collapse", "optimizer_precision")
CASES = [case for case in runs.case_ids() if runs.label(case)["kind"] != "healthy"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def recommended(case, policy, tmp_path):
    checkpoint = None
    if runs.has_checkpoint(case):
        checkpoint = str(tmp_path / "checkpoint.pt")
        runs.write_checkpoint(case, checkpoint)
    request = ReplayRequest(factory=FACTORY, arguments={"case": case}, policy=policy, checkpoint=checkpoint)
    return recommend(request)


def is_as_labelled(case, report):
    label = runs.label(case)
    finding = worst_finding(report)
    assert finding is not None, report.findings
    assert finding.cause in [label["kind"], *label["kinds_ok"]], finding.message
    assert remedied(case, report), finding.prescription


@pytest.mark.parametrize("policy", ["cuda", "native"])
@pytest.mark.parametrize("case", [case for case in CASES if runs.label(case)["kind"] in SCALING])
def test_what_scale_and_precision_do_is_named_with_a_cure(case, policy, tmp_path):
    is_as_labelled(case, recommended(case, policy, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if runs.label(case)["kind"] not in SCALING])
def test_what_no_scale_cures_is_named_with_a_cure(case, tmp_path):
    is_as_labelled(case, recommended(case, "cuda", tmp_path))
