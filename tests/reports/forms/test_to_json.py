from __future__ import annotations

import json
import math
from dataclasses import fields

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.evidence.checkpoint_stats import CastLoss, TensorRow
from ampdoctor.evidence.json_records import to_plain
from ampdoctor.reports.json_report import render_json, schema, strict_json
from tests.diagnosis.summaries import tensor
from tests.samples import EVERY, OVERFLOW, SICK


@pytest.mark.parametrize("name", EVERY)
def test_every_report_follows_the_schema(name, check_report):
    report = check_report(render_json(EVERY[name]))
    assert report["verdict"] == EVERY[name].verdict
    assert report["complete"] == EVERY[name].complete


def test_the_schema_is_valid_and_closed_where_the_object_is_ours():
    loaded = schema()
    jsonschema.Draft202012Validator.check_schema(loaded)
    ours = [loaded, *(loaded["$defs"][name] for name in ("where", "finding", "prescription", "check", "scaler"))]
    assert all(part["additionalProperties"] is False for part in ours)
    assert all(set(part["required"]) == set(part["properties"]) for part in ours)


@pytest.mark.parametrize(
    "damage",
    [
        {"verdict": "unwell"},
        {"findings": [{"code": "AMP201"}]},
        {"profile": {"summary": {"fp16": {"weight_grad": {"flushed": 31.0}}}, "sites": []}},
    ],
)
def test_the_schema_refuses_a_damaged_report(damage, check_report):
    report = {**json.loads(render_json(SICK)), **damage}
    with pytest.raises(jsonschema.ValidationError):
        check_report(json.dumps(report))


def test_verified_cannot_contradict_the_status(check_report):
    report = json.loads(render_json(SICK))
    report["findings"][0]["prescription"]["verified"] = False
    with pytest.raises(jsonschema.ValidationError):
        check_report(json.dumps(report))


def test_a_finding_carries_fingerprint_url_and_verified(check_report):
    finding = check_report(render_json(SICK))["findings"][0]
    assert finding["fingerprint"] == OVERFLOW.fingerprint
    assert finding["url"] == "docs/rules/AMP201.md"
    assert finding["prescription"]["verified"] is True
    assert finding["prescription"]["alternatives"][0]["verified"] is False
    assert finding["where"]["source"] == {"file": "t5.py", "line": 41}


def test_nonfinite_numbers_are_strings_and_floats_have_six_digits(check_report):
    evidence = check_report(render_json(SICK))["findings"][1]["evidence"]
    assert evidence == {"flushed": 0.314159, "unknown": "NaN", "worst": "Infinity"}
    assert to_plain(-math.inf) == "-Infinity"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_rounded_float_is_within_six_digits(x):
    assert to_plain(x) == pytest.approx(x, rel=5.1e-6, abs=0)


def test_numpy_numbers_are_numbers():
    assert to_plain({"a": np.float32(0.5), "b": np.int64(3), "c": (np.float64("nan"),)}) == {
        "a": 0.5,
        "b": 3,
        "c": ["NaN"],
    }
    assert json.loads(strict_json([True, None])) == [True, None]


def test_of_a_tensors_summary_the_row_is_written_and_no_more():
    loss = CastLoss(format="fp16", flushed=0.25, subnormal=0.5, overflowed=0.125, relative_error=0.1, headroom=-1.0)
    row = to_plain(tensor(neg_infs=4, pos_infs=3, casts=(loss,)))
    assert row.keys() == {field.name for field in fields(TensorRow)}
    assert (row["inf"], row["fp16"]) == (7, {"flushed": 0.25, "subnormal": 0.5, "overflowed": 0.125})
    assert row["bf16"] is None


@pytest.mark.parametrize("exact", [65504.0, 2.0**24, 2.0**-20, -(2.0**-24), 1e6 + 1, 0.0])
def test_scales_and_limits_stay_exact(exact):
    assert to_plain(exact) == exact
