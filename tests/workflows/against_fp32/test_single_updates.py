"""How single tensors are written: what stands still or steps wrongly is named, its healthy twins are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

FILE = Path(__file__).with_name("written_runs.py")
SILENT = Path(__file__).with_name("silent_runs.py")


def report_of(name, *, file=FILE, **arguments):
    return bisect_nan(ReplayRequest(factory=f"{file}:{name}", arguments=arguments))


def found(report):
    return [(f.code, f.severity, f.cause, f.where.step, f.where.module, f.where.op) for f in report.findings]


def test_a_temperature_that_stands_still():
    report = report_of("tempered")
    assert found(report) == [("AMP506", "error", "optimizer_precision", 0, "", "aten.addcdiv_")]
    (finding,) = report.findings
    assert finding.evidence["parameters"] == ["scale"]
    assert finding.evidence["steps"] == [0, 1, 2, 3, 4, 5]
    assert (finding.prescription.kind, finding.prescription.status) == ("dtype", "verified")


@pytest.mark.parametrize(
    "arguments", [{"lr": 0.1}, {"optimizer": "kahan"}, {"optimizer": "stochastic"}, {"held": False}], ids=str
)
def test_a_temperature_that_moves_is_compensated_or_is_meant_to_stay(arguments):
    report = report_of("tempered", **arguments)
    assert (report.verdict, found(report)) == ("healthy", [])


def test_norm_gains_that_stand_still_are_a_note_and_their_average_has_nowhere_to_go():
    report = report_of("averaged", decay=0.5, gains=True, lr=1e-3)
    assert found(report) == [("AMP506", "note", "optimizer_precision", 0, "1", "aten.addcdiv_")]
    assert report.verdict == "healthy"


def test_a_second_moment_that_flushes_makes_steps_too_long():
    report = report_of("stepped", eps=1e-4)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.op) == ("AMP507", "error", "aten.addcmul_")
    assert finding.evidence["smallest_ratio"] > 2
    assert (finding.prescription.kind, finding.prescription.status) == ("dtype", "verified")


def test_a_second_moment_that_fits_is_healthy():
    report = report_of("stepped", eps=1e-4, gain=300.0)
    assert (report.verdict, found(report)) == ("healthy", [])


@pytest.mark.parametrize(
    ("name", "arguments", "module", "op", "kind"),
    [
        ("running", {"momentum": 1e-3}, "norm", "aten.batch_norm", "fp32_modules"),
        ("counted", {"start": 2048.0}, "counter", "aten.add_", "fp32_modules"),
        ("averaged", {"decay": 0.9995}, "", "aten.lerp_", "code"),
        ("averaged", {"decay": 0.9995, "anew": True}, "", "aten.add", "code"),
    ],
)
def test_a_state_that_stands_still(name, arguments, module, op, kind):
    report = report_of(name, **arguments)
    assert found(report) == [("AMP508", "error", "optimizer_precision", 0, module, op)]
    cure = report.findings[0].prescription
    assert (cure.kind, cure.status) == (kind, "intervention" if kind == "code" else "verified")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("running", {"momentum": 0.1}),
        ("counted", {"start": 2048.0, "by": 4.0}),
        ("counted", {"start": 1000.0}),
        ("averaged", {"decay": 0.5}),
        ("averaged", {"decay": 0.9995, "lr": 0.0}),
    ],
    ids=str,
)
def test_a_state_that_moves_or_has_nowhere_to_go(name, arguments):
    report = report_of(name, **arguments)
    assert (report.verdict, found(report)) == ("healthy", [])


def test_an_overflow_that_stops_one_tensor_is_named_though_the_others_move():
    (finding,) = report_of("trusting", file=SILENT, times=1024.0).findings
    assert (finding.code, finding.cause) == ("AMP501", "optimizer_precision")
    assert (finding.where.step, finding.where.phase, finding.where.op) == (0, "optimizer", "aten.sum")
    assert finding.evidence["stands_still"] == ["head.weight"]
    assert finding.prescription.verified


def test_a_trust_factor_that_fits_is_healthy():
    report = report_of("trusting", file=SILENT, times=16.0)
    assert (report.verdict, found(report)) == ("healthy", [])


def test_running_statistics_that_have_settled_are_healthy():
    report = report_of("settled", file=SILENT)
    assert (report.verdict, found(report)) == ("healthy", [])
