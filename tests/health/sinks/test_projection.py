"""What a log's lines say to sinks, under which names."""

from __future__ import annotations

import pytest

from ampdoctor.evidence.log_records import ActionLine, CheckpointLine, StepLine
from ampdoctor.health.sinks.metrics import Alert, Projection, Row
from tests.health.sinks.lines import a_run, stamped


def said(lines):
    projection = Projection()
    out = [one for whole in lines for one in projection.of(whole)]
    return [*out, *projection.rest()]


def rows(lines):
    return [one for one in said(lines) if isinstance(one, Row)]


def values(line, *before):
    return rows([*map(stamped, before), stamped(line)])[-1].values


def test_a_step_says_what_is_known_of_it_and_no_more():
    assert values(StepLine(step=0)) == {"step_total": 1}
    known = rows(a_run())[3]
    assert (known.step, known.time_ms) == (3, 1_790_000_001_500)
    assert known.values == {
        "step_total": 4,
        "skipped_steps_total/overflow": 0,
        "loss": 3.25,
        "loss_finite": 1,
        "gradient_norm": 2.0,
        "clipped_gradient_norm": 0.5,
        "loss_scale": 65536,
        "learning_rate": 1e-3,
        "step_duration_seconds": 0.5,
        "data_wait_ratio": 0.25,
        "memory_active_peak_bytes": 3 * 2**30,
        "memory_retries_total": 0,
        "tokens_total": 4 * 4096,
        "tokens_per_second": 8192,
    }


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"max_norm": 1.0}, {"gradient_norm": 8.0, "clipped_gradient_norm": 1.0}),
        ({"max_norm": 9.0}, {"gradient_norm": 8.0, "clipped_gradient_norm": 8.0}),
        ({}, {"gradient_norm": 8.0}),
        ({"norm_clipped": True}, {"clipped_gradient_norm": 8.0}),
        ({"norm_scaled": True, "loss_scale": 4.0}, {"gradient_norm": 2.0}),
        ({"norm_scaled": True}, {}),
    ],
)
def test_the_norm_is_unscaled_and_said_to_be_what_it_is(told, expected):
    found = values(StepLine(step=1, gradient_norm=8.0, **told))
    assert {name: value for name, value in found.items() if "norm" in name} == expected


def test_a_look_is_one_row_however_many_lines_it_takes():
    looks = [row for row in rows(a_run()) if "underflow_max_ratio" in row.values]
    assert [row.step for row in looks] == [5]
    found = looks[0].values
    assert found["underflow_max_ratio"] == 99 / 200
    assert found["gradient_headroom_log2"] == 20.0 - 9.9
    assert found["nonfinite_tensors"] == 1
    layers = {name: value for name, value in found.items() if name.startswith("underflow_ratio/")}
    assert layers == {f"underflow_ratio/layers.{i}.weight": i / 200 for i in range(92, 100)}
    assert found["zero_max_ratio"] == 0
    assert not [name for name in found if name.startswith("zero_ratio/")]  # a series for what is zero is none


def test_alerts_and_what_was_done():
    alerts = [one for one in said(a_run()) if isinstance(one, Alert)]
    assert [(one.step, one.finding.code) for one in alerts] == [(7, "AMP721"), (7, "AMP201")]
    assert values(ActionLine(step=3, action="rollback")) == {"rollbacks_total": 1}
    assert values(ActionLine(step=3, action="skip")) == {"skipped_steps_total/policy": 1}
    assert rows([stamped(ActionLine(step=3, action="look"))]) == []
    assert values(CheckpointLine(step=3, path="x", health="good")) == {
        "last_good_checkpoint_timestamp_seconds": 1_790_000_000
    }
    assert rows([stamped(CheckpointLine(step=3, path="x", health="sick"))]) == []
