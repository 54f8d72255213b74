from __future__ import annotations

import json
import math

import pytest

from ampdoctor.evidence.log_records import DetailLine, LogRecord, StepLine, TensorDetail
from ampdoctor.evidence.log_text import line_of, parse_line_fast, text_of
from tests.evidence.run_log.samples import LINES, STAMP, TENSOR

PLAIN = text_of(LogRecord(STAMP, StepLine(step=3, loss=1.5, learning_rates=(0.1,))))
DETAIL = text_of(LogRecord(STAMP, DetailLine(step=3, tensors=(TensorDetail(tensor=0, role="gradient", norm=0.5),))))


@pytest.mark.parametrize("line", LINES, ids=lambda line: type(line).__name__)
def test_it_reads_what_the_checked_way_reads(line):
    text = text_of(LogRecord(STAMP, line))
    assert parse_line_fast(text) == line_of(text)


def test_a_record_that_was_made_the_quick_way_is_like_any_other():
    line = parse_line_fast(PLAIN).line
    assert (type(line), repr(line), hash(line)) == (StepLine, repr(line_of(PLAIN).line), hash(line_of(PLAIN).line))
    with pytest.raises(AttributeError):
        line.step = 4


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (PLAIN, {"loss": "NaN"}),
        (PLAIN, {"loss": 1}),
        (PLAIN, {"gradient_norm": "Infinity", "unknown": [1]}),
        (PLAIN, {"learning_rates": [1, 2]}),
        (PLAIN, {"loss": None}),
        (PLAIN, {"schema_version": 3}),
        (PLAIN, {"kind": "weather"}),
        (PLAIN, {"run_id": ""}),
        (DETAIL, {"tensors": [{"tensor": 1, "role": "gradient", "norm": "NaN", "unknown": 1}]}),
        (DETAIL, {"tensors": []}),
    ],
)
def test_what_is_not_plain_goes_the_checked_way(text, change):
    changed = json.dumps(json.loads(text) | change)
    quick, slow = parse_line_fast(changed), line_of(changed)
    assert repr(quick) == repr(slow)  # NaN is not itself


@pytest.mark.parametrize(
    ("text", "change"),
    [
        (PLAIN, {"step": -1}),
        (PLAIN, {"step": 2**64}),
        (PLAIN, {"step": 1.0}),
        (PLAIN, {"step": True}),
        (PLAIN, {"skipped": 1}),
        (PLAIN, {"loss": "high"}),
        (PLAIN, {"learning_rates": "abc"}),
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
        parse_line_fast(changed)
    assert str(quick.value) == str(slow.value)


def test_a_nan_that_is_no_string_is_read_as_the_checked_way_reads_it():
    changed = PLAIN.replace('"loss":1.5', '"loss":NaN')
    assert math.isnan(parse_line_fast(changed).line.loss) == math.isnan(line_of(changed).line.loss)


def test_a_histogram_comes_along():
    text = text_of(LogRecord(STAMP, DetailLine(step=1, tensors=(TENSOR,))))
    assert parse_line_fast(text).line.tensors[0].histogram == line_of(text).line.tensors[0].histogram


@pytest.mark.parametrize("parse", [json.loads, None], ids=["json", "orjson"])
@pytest.mark.parametrize("number", ["0.1", "1e-320", "1.7976931348623157e308", "123456.789", "2.2250738585072014e-308"])
def test_whoever_parses_gives_the_same_numbers(monkeypatch, parse, number):
    parse = parse or pytest.importorskip("orjson").loads
    monkeypatch.setattr("ampdoctor.evidence.log_text._loads", parse)
    changed = PLAIN.replace("1.5", number)
    assert parse_line_fast(changed).line.loss == float(number)
    for wrong in (changed[:-9], changed.replace(number, "[" * 2000), changed.replace('"step":3', f'"step":{2**70}')):
        with pytest.raises(ValueError):
            parse_line_fast(wrong)
    assert math.isnan(parse_line_fast(PLAIN.replace("1.5", "NaN")).line.loss)
