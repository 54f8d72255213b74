"""Inputs of public bug reports (fixtures/public) on which the close look failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

PUBLIC = Path(__file__).parents[2] / "fixtures" / "public"


def test_a_kernel_that_is_wrong_for_one_length():
    report = bisect_nan(ReplayRequest(factory=str(PUBLIC / "kernel_defect" / "script.py")))
    (finding,) = report.findings
    assert (finding.code, finding.cause, finding.where.step, finding.where.phase) == (
        "AMP202",
        "kernel_defect",
        6,
        "backward",
    )
    assert "this kernel returns NaN where the result is finite and in range" in finding.message
    assert "Try another kernel" in finding.help
    tried = [finding.prescription, *finding.prescription.alternatives]
    assert any("oneDNN off" in one.detail for one in tried)
    assert all("proves no cause" in one.detail for one in tried if one.kind == "dtype")


def test_a_saturated_hidden_state_that_is_transposed_in_place():
    report = bisect_nan(ReplayRequest(factory=f"{PUBLIC / 'inplace_view_crash' / 'script.py'}:make_run"))
    assert (report.findings[0].code, report.findings[0].where.op) == ("AMP201", "aten.mul")
    assert not any("defect of ampdoctor" in one.reason for one in report.skipped)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRU", "RNN", "LSTM"])
@pytest.mark.parametrize(("factor", "codes"), [("1e3", set()), ("1e4", {"AMP201", "AMP204"})])
def test_a_recurrent_network_with_the_batch_first(tmp_path, kind, factor, codes):
    """An outlier of 64367 is within fp16's range, and its first gradients overflow at every scale that is tried first;
    one of ten times that is not."""
    given = (PUBLIC / "inplace_view_crash" / "gru.py").read_text(encoding="utf-8")
    script = tmp_path / "gru.py"
    script.write_text(given.replace("nn.GRU", f"nn.{kind}").replace("1e3", factor), encoding="utf-8")
    report = bisect_nan(ReplayRequest(factory=str(script)))
    errors = {finding.code for finding in report.findings if finding.severity == "error"}
    assert errors <= codes
    assert bool(errors) == bool(codes)
