"""One op that goes wrong, for many ops: module, op, phase and cause come from its numbers, not from its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows.ops_runs import ALL, CAUSES

FILE = Path(__file__).with_name("ops_runs.py")


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, cases in ALL.items() for name in cases])
def test_an_op_that_goes_wrong(group, name):
    case = ALL[group][name]
    given = {"group": group, "case": name}
    report = bisect_nan(ReplayRequest(factory=f"{FILE}:make_run", arguments=given, steps=1))
    assert report.errors == ()
    finding = report.findings[0]
    where = finding.where
    assert where.op.removeprefix("aten.") in (case.op, *case.also)
    assert where.module.startswith("body.0")
    assert where.phase == ("backward" if group == "backward" else "forward")
    assert where.nonfinite == case.nonfinite
    assert finding.cause == (case.cause or CAUSES[group])
    line = where.forward_source if group == "backward" else where.source
    assert line.file.endswith("ops_runs.py")
    operand = finding.evidence.get("operand")
    assert (operand and operand["made_by"]) == case.made_by
    if group == "inside":
        assert "a partial result in the op is above" in finding.message or "largest value" in finding.message
