"""The schema of a line. `PYTHONPATH=. python tests/evidence/run_log/test_schema.py --write` makes it anew."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import jsonschema

import ampdoctor.evidence
from ampdoctor.evidence.log_records import KINDS, LogRecord
from ampdoctor.evidence.log_text import text_of
from tests.evidence.run_log.samples import EVERY, STAMP
from tests.schemas import of_a_line_of_a_log

PLACE = Path(ampdoctor.evidence.__file__).with_name("run-log-line.schema.json")


def text_of_schema():
    return json.dumps(of_a_line_of_a_log(), indent=2) + "\n"


def read(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_shipped_is_what_the_classes_give():
    jsonschema.Draft202012Validator.check_schema(json.loads(PLACE.read_text()))
    assert PLACE.read_text(encoding="utf-8") == text_of_schema()


def test_every_kind_has_a_sample_in_which_every_field_is_set():
    assert {type(whole.line) for whole in EVERY.values()} == set(KINDS.values())
    for whole in EVERY.values():
        for record in (whole.stamp, whole.line):
            defaults = [
                field.name
                for field in fields(record)
                if field.default is not MISSING and getattr(record, field.name) == field.default
            ]
            assert defaults in ([], ["schema_version"]), record


def test_every_line_follows_the_schema_also_one_of_defaults_and_a_damaged_one_does_not():
    validator = jsonschema.Draft202012Validator(json.loads(PLACE.read_text()))
    for whole in EVERY.values():
        line = whole.line
        needed = {f.name: getattr(line, f.name) for f in fields(line) if f.default is f.default_factory is MISSING}
        for one in (whole, LogRecord(stamp=STAMP, line=type(line)(**needed))):
            validator.validate(read(text_of(one)))
    for damage in ({"kind": "steep"}, {"step": -1}, {"further": 1}, {"loss": "nan"}, {"time_ms": 0.5}):
        assert not validator.is_valid({**read(text_of(EVERY["StepLine"])), **damage}), damage


if __name__ == "__main__" and "--write" in sys.argv:
    PLACE.write_text(text_of_schema(), encoding="utf-8")
