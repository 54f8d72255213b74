from __future__ import annotations

import json
import math

import pytest

from ampdoctor.evidence.log_records import DetailLine, LogRecord, StepLine, TensorDetail
from ampdoctor.evidence.log_text import line_of, parse_line_fast, text_of
from tests.evidence.run_log.samples import LINES, STAMP

PLAIN = text_of(LogRecord(STAMP, StepLine(step=3, loss=1.5, learning_rates=(0.1,))))
DETAIL = text_of(LogRecord(STAMP, DetailLine(step=3, tensors=(TensorDetail(tensor=0, role="gradient", norm=0.5),))))


@pytest.mark.parametrize("line", LINES, ids=lambda line: type(line).__name__)
def test_it_reads_what_the_checked_way_reads(line):
    text = text_of(LogRecord(STAMP, line))
    assert parse_line_fast(text) == line_of(text)


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
        parse_line_fast(changed)
    assert str(quick.value) == str(slow.value)


@pytest.mark.parametrize("number", ["0.1", "1.7976931348623157e308", "2.2250738585072014e-308"])
def test_orjson_gives_the_same_numbers(monkeypatch, number):
    monkeypatch.setattr("ampdoctor.evidence.log_text._loads", pytest.importorskip("orjson").loads)
    changed = PLAIN.replace("1.5", number)
    assert parse_line_fast(changed).line.loss == float(number)
    for wrong in (changed[:-9], changed.replace(number, "[" * 2000), changed.replace('"step":3', f'"step":{2**70}')):
        with pytest.raises(ValueError):
            parse_line_fast(wrong)
