"""The schemas that are shipped, and JSON lines, which follow theirs.

`PYTHONPATH=. python tests/reports/forms/test_schema.py --write` makes them anew."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
from referencing import Registry, Resource

import ampdoctor.reports
from ampdoctor.evidence.json_records import from_plain
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Report
from ampdoctor.reports.json_report import LISTS, render_jsonl, report_as_dict, schema
from tests.reports.full_sample import full
from tests.samples import EVERY
from tests.schemas import of_report, schema_of

FOLDER = Path(ampdoctor.reports.__file__).parent
REPORT = "urn:ampdoctor:report:1"
ENTRIES = {
    "finding": "$defs/finding",
    "suppressed": "$defs/suppressed",
    "check": "$defs/check",
    "skipped": "$defs/skipped",
    "error": "$defs/error_note",
    "tensor": "$defs/tensor_row",
}
SAMPLES = {**EVERY, "full": full()}


def line_schema():
    """The schema of a line, made from the report's: what it says of a key holds for the key in a line."""
    report = schema()

    def line(kind, properties):
        known = {"type": {"const": kind}, **properties}
        return {"type": "object", "properties": known, "required": sorted(known), "additionalProperties": False}

    def entry(kind, pointer):
        node = report
        for part in pointer.split("/"):
            node = node[part]
        return line(kind, {key: {"$ref": f"{REPORT}#/{pointer}/properties/{key}"} for key in node["properties"]})

    single = [key for key in report["properties"] if key not in LISTS.values()]
    counts = {key: {"type": "integer", "minimum": 0} for key in LISTS.values()}
    counts["tensors"] = {"type": ["integer", "null"], "minimum": 0}
    verdict = {key: {"$ref": f"{REPORT}#/properties/{key}"} for key in ("verdict", "complete")}
    definitions = {
        "report": line("report", {key: {"$ref": f"{REPORT}#/properties/{key}"} for key in single}),
        **{kind: entry(kind, pointer) for kind, pointer in ENTRIES.items()},
        "summary": line("summary", {**verdict, **counts}),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:ampdoctor:report-line:1",
        "title": "A line of an ampdoctor report with --format jsonl",
        "description": "First a report line, then one for each entry of its lists, last a summary, which counts them.",
        "type": "object",
        "required": ["type"],
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in definitions],
        "$defs": definitions,
    }


MADE = {"report.schema.json": of_report, "report-line.schema.json": line_schema}


def text_of(made):
    return json.dumps(made, indent=2) + "\n"


@pytest.mark.parametrize("name", MADE)
def test_what_is_shipped_is_what_the_classes_give(name):
    jsonschema.Draft202012Validator.check_schema(MADE[name]())
    assert (FOLDER / name).read_text(encoding="utf-8") == text_of(MADE[name]())


def test_every_field_of_a_report_is_in_its_schema():
    written = {name for name, field in Report.__dataclass_fields__.items() if field.metadata.get("written", True)}
    assert written | {"schema_version", "tool"} == set(schema()["properties"])


@dataclass
class Undescribed:
    """A record of a number."""

    number: int


def test_a_field_that_nobody_has_described_has_no_schema():
    with pytest.raises(KeyError, match="number"):
        schema_of(Undescribed)


def test_a_field_whose_key_is_missing_has_its_default():
    assert from_plain(Where, {"phase": "loss", "further": 1}) == Where(phase="loss")


def lines_of(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture(scope="module")
def validator():
    registry = Registry().with_resource(REPORT, Resource.from_contents(schema()))
    written = json.loads((FOLDER / "report-line.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(written)
    return jsonschema.Draft202012Validator(written, registry=registry)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_line_follows_the_schema(name, validator):
    for line in lines_of(render_jsonl(SAMPLES[name])):
        validator.validate(line)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_lines_are_the_report_and_nothing_is_lost(name):
    report = SAMPLES[name]
    header, *entries, summary = lines_of(render_jsonl(report))
    whole = {key: value for key, value in header.items() if key != "type"}
    for kind, key in LISTS.items():
        alike = [{k: v for k, v in entry.items() if k != "type"} for entry in entries if entry["type"] == kind]
        whole[key] = None if summary[key] is None else alike
        assert (summary[key] or 0) == len(alike)
    assert whole == report_as_dict(report)
    assert (header["type"], summary["type"], summary["verdict"]) == ("report", "summary", report.verdict)


if __name__ == "__main__" and "--write" in sys.argv:
    for name, made in MADE.items():
        (FOLDER / name).write_text(text_of(made()), encoding="utf-8")
