"""While the order of a scaler's calls is broken, nothing else is called a cure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.diagnosis.replay.scaler import lost_scale_finding, stepped_again_finding
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.workflows.judge import unproved_while_misused
from tests.samples import OVERFLOW

AGAIN = stepped_again_finding(0, None, held_back=False)


def test_a_change_beside_a_misuse_is_not_proved():
    kept, other = unproved_while_misused([AGAIN, OVERFLOW])
    assert kept is AGAIN
    assert OVERFLOW.prescription.verified
    assert other.prescription.status == "not_run"
    assert "optimizer.step" in other.prescription.reason


@pytest.mark.parametrize(
    "beside",
    [
        lost_scale_finding(ScalerState(scale=64.0), 65536.0),
        replace(AGAIN, severity="warning"),
        replace(OVERFLOW, cause="scaler_misuse"),
    ],
)
def test_what_breaks_no_order_of_calls_takes_no_proof_away(beside):
    assert unproved_while_misused([beside, OVERFLOW]) == [beside, OVERFLOW]
