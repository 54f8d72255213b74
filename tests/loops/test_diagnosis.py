"""Training scripts as people write them are diagnosed as they are: the sick as labelled, the healthy not at all.

Their truths were found by hand in the bare scripts: `fixtures/loops/README.md` says how.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from tests.loops.trained import LOOPS, SCRIPTS, each, request_of


def said(finding):
    """What a finding says of its place, with the user's line in short."""
    where = finding.where
    line = None if where.source is None else f"{Path(where.source.file).name}:{where.source.line}"
    parts = {"code": finding.code, "line": line}
    return {**parts, **{name: getattr(where, name) for name in ("step", "phase", "module", "op", "tensor")}}


@pytest.mark.each_value_once
@pytest.mark.parametrize(("script", "policy"), each(*SCRIPTS, fast=("vision_ema",)))
def test_the_sick_script_is_diagnosed(script, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = bisect_nan(request_of(script, script.sick.arguments, policy))
    if policy not in script.sick.policies:
        assert (report.verdict, report.findings, report.run["precision"]) == ("healthy", (), "fp32")
        return
    assert report.verdict == "sick"
    (error,) = (finding for finding in report.findings if finding.severity == "error")
    assert {name: said(error)[name] for name in script.sick.found} == script.sick.found


@pytest.mark.each_value_once
@pytest.mark.parametrize(("script", "policy"), each(*(script for script in SCRIPTS if script.silent)))
def test_what_stays_finite_is_seen_beside_fp32(script, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = bisect_nan(request_of(script, script.silent.arguments, policy))
    (error,) = (finding for finding in report.findings if finding.severity == "error")
    assert {name: said(error)[name] for name in script.silent.found} == script.silent.found
    assert error.prescription.verified


@pytest.mark.each_value_once
@pytest.mark.parametrize(("script", "policy"), each(*SCRIPTS, fast=("gan",)))
def test_the_healthy_script_is_left_alone(script, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = bisect_nan(request_of(script, (), policy))
    assert (report.verdict, report.findings, report.errors) == ("healthy", (), ())
    assert not [left.reason for left in report.skipped if "do not come back" in left.reason]


def test_every_script_of_the_folder_is_in_the_table():
    readme = (LOOPS / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in LOOPS.glob("*.py")} == {*re.findall(r"^\| `(\w+\.py)` \|", readme, re.MULTILINE)}
    for script in SCRIPTS:
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{script.path.name}` |"))
        assert f"`{' '.join(script.sick.arguments)}`" in row
        assert {str(value) for value in script.sick.found.values() if value != ""} <= {
            *row.replace("`", "").replace(",", "").split()
        }
