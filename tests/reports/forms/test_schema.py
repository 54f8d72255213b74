"""The schemas that are shipped. `PYTHONPATH=. python tests/reports/forms/test_schema.py --write` makes them anew."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

import ampdoctor.reports
from ampdoctor.evidence.json_records import from_plain
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Report
from ampdoctor.reports.json_report import schema
from tests.reports.forms.test_to_jsonl import line_schema
from tests.schemas import of_report, schema_of

FOLDER = Path(ampdoctor.reports.__file__).parent
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


if __name__ == "__main__" and "--write" in sys.argv:
    for name, made in MADE.items():
        (FOLDER / name).write_text(text_of(made()), encoding="utf-8")
