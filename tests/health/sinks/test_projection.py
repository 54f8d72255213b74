"""What a log's lines say to sinks, under which names."""

from __future__ import annotations

import itertools
import math

import pytest

from ampdoctor.evidence.log_records import ActionLine, CheckpointLine, RunLine, StepLine
from ampdoctor.health.sinks.metrics import METRICS, Alert, Projection, Row, name_of, parts_of, together
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


def test_throughput_is_over_all_the_steps_since_the_line_before():
    """As in a log with a line every ten steps: the seconds of a line are those of one step."""
    lines = [StepLine(step=at, seconds=1.0, samples=512 * at, tokens=2048 * at) for at in (10, 20, 30, 31)]
    assert [row.values.get("samples_per_second") for row in rows(map(stamped, lines))] == [None, 512, 512, 512]
    assert [row.values.get("tokens_per_second") for row in rows(map(stamped, lines))] == [None, 2048, 2048, 2048]
    undone = StepLine(step=20, seconds=1.0, samples=40 * 512)
    assert "samples_per_second" not in values(undone, *lines)


def test_what_is_not_finite_is_said():
    by_step = {row.step: row.values for row in rows(a_run()) if "loss" in row.values}
    assert math.isnan(by_step[7]["loss"])
    assert [by_step[step]["loss_finite"] for step in (6, 7)] == [1, 0]
    assert by_step[4]["gradient_norm"] == math.inf
    assert "clipped_gradient_norm" not in by_step[4]
    assert [by_step[step]["skipped_steps_total/overflow"] for step in (3, 4, 9)] == [0, 1, 1]


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


def test_a_second_optimizer_has_names_of_its_own():
    header = RunLine(name="gan", optimizers=("optimizer", "optimizer2"))
    assert values(StepLine(step=0, loss=1.0), header).keys() == {"step_total", "loss", "loss_finite"}
    second = values(StepLine(step=0, optimizer=1, loss=1.0), header)
    assert second.keys() == {"optimizer2/step_total", "optimizer2/loss", "optimizer2/loss_finite"}


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


def test_the_facts_of_the_run_come_from_its_newest_header():
    projection = Projection()
    for line in (RunLine(name="a"), RunLine(name="a", precision="bf16", tool="1.0"), StepLine(step=0)):
        list(projection.of(stamped(line, world_size=4)))
    facts = projection.facts
    assert (facts.name, facts.precision, facts.version, facts.world_size) == ("a", "bf16", "1.0", 4)


def test_names_can_be_taken_apart_again():
    for metric, optimizer, label in itertools.product(METRICS, ("", "optimizer2"), ("", "model/layers.0.weight")):
        assert parts_of(name_of(metric, label, optimizer)) == (METRICS[metric], label, optimizer)


def test_what_stands_for_several_steps_is_the_last_the_worst_or_what_is_not_finite():
    held = {}
    for loss, scale, rate in ((1.0, 8.0, 1.0), (math.nan, 2.0, 2.0), (3.0, 4.0, 3.0)):
        together(held, {"loss": loss, "loss_scale": scale, "learning_rate": rate})
    assert math.isnan(held.pop("loss"))
    assert held == {"loss_scale": 2.0, "learning_rate": 3.0}
