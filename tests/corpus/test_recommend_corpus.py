"""`recommend` on the labelled runs whose loss scale is at fault: the label's cause, with a cure that was shown.

Of other causes its report is that of `bisect-nan`: tests/workflows/advising/test_first_search.py.
"""

from __future__ import annotations

import pytest

from ampdoctor.workflows.recommend import SCALING
from fixtures.corpus import runs
from tests.corpus.judging import remedied, worst_finding
from tests.corpus.reports import SICK, kind_and_phase, of_case, policies, recommended

QUICK = (
    "grad_underflow_no_scaler",
    "scale_collapsed_then_underflow",
    "no_valid_scale_collapse",
    "static_loss_scale_overflow",
)
"""One of each cause, of which most are asked in other files as well: the others are slow."""
SCALED = [case for case in SICK if runs.label(case)["kind"] in SCALING]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.each_value_once(of=kind_and_phase)
@pytest.mark.parametrize(
    ("case", "policy"),
    [of_case(case, policy, slow=case not in QUICK or policy != "cuda") for case in SCALED for policy in policies(case)],
)
def test_what_is_wrong_is_named_with_a_cure(case, policy):
    report = recommended(case, policy)
    label, finding = runs.label(case), worst_finding(report)
    assert finding is not None, report.findings
    assert finding.cause in [label["kind"], *label["kinds_ok"]], finding.message
    assert remedied(case, report), finding.prescription
