"""Reports of an earlier version are merged and shown in every form, and nothing of them is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ampdoctor.cli.main import main
from ampdoctor.reports.json_report import report_as_dict
from ampdoctor.reports.read_json import report_from_text
from tests.reports.test_hostile_names import FORMATS, rendered

WRITTEN = sorted(Path(__file__).with_name("written_by_0_1_0").glob("*.json*"), key=lambda path: path.name)
SECTIONS = "scaler profile precision trend change structure tensors path proof baseline gate configuration".split()


def as_one(path):
    """The JSON report that a file holds; of JSON lines what has no list, the one to compare."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else json.loads(text.partition("\n")[0])


def test_every_section_is_in_one_of_them():
    whole = [json.loads(path.read_text(encoding="utf-8")) for path in WRITTEN if path.suffix == ".json"]
    assert {one["command"] for one in whole} == {"scan", "bisect-nan", "profile", "recommend"}
    missing = [name for name in SECTIONS if not any(one[name] for one in whole)]
    assert missing == ["configuration"]
    assert any(one["thresholds"] for one in whole)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_nothing_of_it_is_lost(path):
    written = as_one(path)
    again = report_as_dict(report_from_text(path.read_text(encoding="utf-8")))
    kept = {key: value for key, value in written.items() if key not in ("tool", "type")}
    assert {key: again[key] for key in kept} == kept


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_it_is_shown_in_every_form(path):
    report = report_from_text(path.read_text(encoding="utf-8"))
    for form in FORMATS:
        assert rendered(form, report)


@pytest.mark.parametrize("form", FORMATS)
def test_several_are_merged_into_every_form(form, capsys):
    scans = [str(path) for path in WRITTEN if path.name.startswith("scan")]
    assert main(["merge", *scans, "--format", form, "--exit-zero"]) == 0
    out = capsys.readouterr().out
    assert "AMP101" in out
    if form == "json":
        assert json.loads(out)["verdict"] == "sick"
