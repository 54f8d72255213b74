"""Lines as text, and back: with every check, and fast."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ampdoctor.evidence.json_records import DuplicateKeyError
from ampdoctor.evidence.log_records import ActionLine, DetailLine, LogRecord, StepLine, TensorDetail
from ampdoctor.evidence.log_text import kind_of, line_of, parse_lines, text_of
from tests.evidence.run_log.samples import EVERY, LINES, STAMP


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


# -- the faster parser

PLAIN = text_of(LogRecord(STAMP, StepLine(step=3, loss=1.5, learning_rates=(0.1,))))
DETAIL = text_of(LogRecord(STAMP, DetailLine(step=3, tensors=(TensorDetail(tensor=0, role="gradient", norm=0.5),))))


def read(text):
    """What `parse_lines` makes of one text; raises what it gives in place of a line."""
    ((_, found),) = parse_lines([text.encode()])
    if isinstance(found, ValueError):
        raise found
    return found


@pytest.mark.parametrize("line", LINES, ids=lambda line: type(line).__name__)
def test_it_reads_what_the_checked_way_reads(line):
    text = text_of(LogRecord(STAMP, line))
    assert read(text) == line_of(text)


@pytest.mark.parametrize("parser", ["json", "orjson"])
@pytest.mark.parametrize(
    ("text", "change"),
    [
        (PLAIN, {"loss": 1}),
        (PLAIN, {"gradient_norm": "Infinity", "unknown": [1]}),
        (PLAIN, {"learning_rates": [1, 2]}),
        (PLAIN, {"loss": None}),
        (PLAIN, {"schema_version": 3}),
        (PLAIN, {"kind": "weather"}),
        (PLAIN, {"loss": math.nan}),
        (PLAIN, {"loss": 2**63, "gradient_norm": 2**64, "loss_scale": 10**300}),
        (DETAIL, {"tensors": [{"tensor": 1, "role": "gradient", "norm": "NaN", "unknown": 1}]}),
        (DETAIL, {"tensors": []}),
    ],
)
def test_what_is_not_plain_goes_the_checked_way(monkeypatch, parser, text, change):
    monkeypatch.setattr("ampdoctor.evidence.log_text._loads", pytest.importorskip(parser).loads)
    changed = json.dumps(json.loads(text) | change)
    assert repr(read(changed)) == repr(line_of(changed))  # NaN is not itself


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (PLAIN, {"step": -1}),
        (PLAIN, {"step": 2**64}),
        (PLAIN, {"loss": 10**400}),
        (PLAIN, {"skipped": 1}),
        (PLAIN, {"loss": "high"}),
        (PLAIN, {"step": None}),
        (PLAIN, {"run_id": 5}),
        (PLAIN, {"learning_rates": 5}),
        (PLAIN, {"rank": -1}),
        (DETAIL, {"tensors": [{"tensor": 1, "role": "hero"}]}),
        (DETAIL, {"tensors": [{"tensor": 1, "role": "gradient", "zero_share": 1.5}]}),
        (DETAIL, {"tensors": [{"role": "gradient"}]}),
        (DETAIL, {"tensors": [[]]}),
    ],
)
def test_what_is_wrong_is_refused_as_the_checked_way_does(text, change):
    changed = json.dumps(json.loads(text) | change)
    with pytest.raises(ValueError) as slow:
        line_of(changed)
    with pytest.raises(ValueError) as quick:
        read(changed)
    assert str(quick.value) == str(slow.value)


@pytest.mark.parametrize("number", ["0.1", "1.7976931348623157e308", "2.2250738585072014e-308"])
def test_orjson_gives_the_same_numbers(monkeypatch, number):
    monkeypatch.setattr("ampdoctor.evidence.log_text._loads", pytest.importorskip("orjson").loads)
    changed = PLAIN.replace("1.5", number)
    assert read(changed).line.loss == float(number)
    for wrong in (changed[:-9], changed.replace(number, "[" * 2000), changed.replace('"step":3', f'"step":{2**70}')):
        with pytest.raises(ValueError):
            read(wrong)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace('"loss"', '"loss":"NaN","loss"'),
        PLAIN.replace('"loss"', '"loss" :2.0,"loss"'),
        DETAIL.replace('"norm"', '"norm":"NaN","norm"'),
    ],
)
def test_a_key_that_stands_twice_is_refused(text):
    for read_ in (line_of, read):
        with pytest.raises(DuplicateKeyError):
            read_(text)


WHOLE = [PLAIN.encode(), PLAIN.replace('"step":3', '"step":4').encode(), DETAIL.encode()]


@pytest.mark.parametrize(
    "odd",
    [
        ['{"kind":"step","a":1},{"b":2}', '{"kind":"step","c":[1', '{"kind":"step"]}'],
        ['{"kind":"step","run_id":"}', '{"kind":"step","run_id":"{"}'],
        [PLAIN.replace('"step":3', '"step":5,"loss_scale":"Infinity"')],
        [PLAIN.replace('"step":3', '"step":5,"later":{"a":1}'), PLAIN.rstrip() + "\x0c\n", PLAIN.rstrip() + " \r\n"],
        [PLAIN.replace('"schema_version":2', '"schema_version":3'), PLAIN[:40], "", PLAIN.replace('"r1"', '"\\ud800"')],
    ],
)
def test_lines_that_are_read_together_are_what_each_is_alone(odd):
    texts = [*WHOLE, *(text.encode() for text in odd), *WHOLE]
    alone = [one for text in texts for one in parse_lines([text])]
    assert [(text, repr(found)) for text, found in parse_lines(texts)] == [(text, repr(one)) for text, one in alone]
    assert [text for text, _ in alone] == texts
    assert [found.line for _, found in alone[-3:]] == [line_of(text).line for text in WHOLE]
