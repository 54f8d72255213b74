"""Lines as text, and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ampdoctor.evidence.log_records import ActionLine, LogRecord, StepLine
from ampdoctor.evidence.log_text import kind_of, line_of, text_of
from tests.evidence.run_log.samples import EVERY, STAMP


def same(one, other):
    """Equal, NaN being itself."""
    return repr(one) == repr(other)


@pytest.mark.parametrize("name", EVERY)
def test_a_line_comes_back_as_it_was(name):
    text = text_of(EVERY[name])
    assert (text.count("\n"), text[-1], text.isascii()) == (1, "\n", True)
    assert kind_of(text.encode()) == json.loads(text)["kind"]
    back = line_of(text)
    if name == "RunLine":
        assert back == EVERY[name]
    elif name in {"AlertLine", "LookLine"}:  # what is free in form stays as JSON has it
        assert json.loads(text_of(back)) == json.loads(text)
    else:
        assert same(back, EVERY[name])


def test_what_has_its_default_is_left_out():
    text = text_of(LogRecord(stamp=replace(STAMP, attempt=0), line=StepLine(step=3, loss=0.0)))
    assert set(json.loads(text)) == {
        *("kind", "schema_version", "run_id", "branch", "rank", "world_size", "restarts", "time_ms"),
        *("step", "loss"),
    }


def test_a_floats_digits_are_those_of_every_report_and_a_scale_is_exact():
    line = StepLine(step=0, loss=1.23456789, loss_scale=2.0**-133, learning_rates=(math.inf,))
    assert '"loss":1.23457,' in text_of(LogRecord(stamp=STAMP, line=line))
    assert line_of(text_of(LogRecord(stamp=STAMP, line=line))).line == replace(line, loss=1.23457)


def test_unknown_keys_and_kinds_and_later_versions_are_passed_by():
    values = json.loads(text_of(EVERY["StepLine"]))
    assert same(line_of(json.dumps({**values, "colour": {"red": 1}})), EVERY["StepLine"])
    assert line_of(json.dumps({**values, "kind": "weather"})) is None
    assert line_of(json.dumps({**values, "schema_version": 3})) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"kind":3}', '{"kind":"step","schema_version":2}', "[" * 100_000])
def test_what_is_no_line_is_refused(text):
    with pytest.raises(ValueError):
        line_of(text)


def test_a_torn_line_is_refused_wherever_it_is_torn():
    text = text_of(EVERY["DetailLine"]).rstrip("\n")
    for end in range(1, len(text)):
        with pytest.raises(ValueError):
            line_of(text[:end])


def test_what_json_has_no_form_for_is_named():
    line = ActionLine(step=1, action="x", facts={"file": object()})
    with pytest.raises(TypeError, match="object, which JSON has no form for"):
        text_of(LogRecord(stamp=STAMP, line=line))
