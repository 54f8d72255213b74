from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from ampdoctor.evidence.log_records import ActionLine, CheckpointLine, DetailLine, EndLine, LookLine, LostLine, StepLine
from ampdoctor.health.condense import MOST_SPANS, RunSummarizer, Spans, curve_of, spans_of
from ampdoctor.health.heat_maps import MOST_COLUMNS, MOST_ROWS, Maps
from tests.health.logs import HEADER, NAMES, detail, stamped, steps


def condensed(lines, *, lately=False):
    condenser = RunSummarizer()
    for line in lines:
        condenser.add(line if hasattr(line, "stamp") else stamped(line))
    return condenser.runs(name="run", source="runs/run", kind="ampdoctor", lately=lately)


def one(lines, **more):
    (run,) = condensed(lines, **more)
    return run


def curve(run, name):
    return next((found for found in run.curves if found.name == name), None)


def test_the_99th_percentile_of_a_span_is_not_its_longest_step():
    seconds = np.full(400_000, 0.5)
    seconds[1000] = 9.0
    found = curve_of("step_seconds", seconds, spans_of(np.arange(400_000.0)))
    assert (max(found.high), max(found.p99)) == (9.0, 0.5)


def test_a_short_run_has_a_span_for_each_step():
    run = one([HEADER, *steps(5, 8, seconds=0.5, tokens=None), EndLine(exit_code=3)])
    assert (run.name, run.precision, run.ending, run.exit_code) == ("small", "fp16", "ended", 3)
    assert (run.steps, run.first_step, run.last_step, run.skip_share) == (3, 5, 7, None)
    assert (run.axis.first, run.axis.last, run.axis.samples) == ((5, 6, 7), (5, 6, 7), None)
    loss = curve(run, "loss")
    assert (loss.low, loss.middle, loss.high, loss.nonfinite) == ((2.0,) * 3, (2.0,) * 3, (2.0,) * 3, None)
    assert curve(run, "loss_scale") is None


def test_a_long_run_keeps_the_extremes_of_each_span():
    draw = random.Random(3)
    values = [draw.gauss(2, 0.1) for _ in range(25_000)]
    values[12_345], values[20_000] = 97.0, math.nan
    run = one([HEADER, *(StepLine(step=at, loss=value) for at, value in enumerate(values))])
    loss = curve(run, "loss")
    assert len(loss.low) == MOST_SPANS == len(run.axis.first)
    span = next(at for at, last in enumerate(run.axis.last) if last >= 12_345)
    inside = values[run.axis.first[span] : run.axis.last[span] + 1]
    assert (loss.low[span], loss.high[span]) == (min(inside), 97.0)
    assert loss.middle[span] == pytest.approx(sorted(inside)[len(inside) // 2], abs=0.1)
    assert sum(loss.nonfinite) == 1
    assert run.axis.first[0] == 0
    assert run.axis.last[-1] == 24_999
    assert all(last + 1 == first for last, first in zip(run.axis.last, run.axis.first[1:], strict=False))


def test_the_middle_is_the_median():
    values = np.array([5.0, 1.0, 2.0, np.nan, 9.0, np.inf, np.nan, np.nan])
    found = curve_of("loss", values, Spans(np.array([0, 4, 6]), 8))
    assert (found.low, found.middle, found.high) == ((1.0, 9.0, None), (2.0, 9.0, None), (5.0, 9.0, None))
    assert found.nonfinite == (0, 1, 0)


def test_what_a_rollback_or_a_restart_has_undone_is_not_shown():
    first = steps(0, 10, loss=1.0)
    second = [stamped(step, attempt=1, branch=0) for step in steps(6, 8, loss=2.0)]
    third = [stamped(step, attempt=1, branch=0, restarts=1) for step in steps(7, 9, loss=3.0)]
    run = one([HEADER, *first, *second, *third])
    assert run.axis.first == tuple(range(9))
    assert curve(run, "loss").middle == (*[1.0] * 6, 2.0, 3.0, 3.0)


def test_throughput_is_what_was_counted_between_two_steps():
    # the seconds of a line are those of one step, however many lie between two lines
    lines = [StepLine(step=at, seconds=0.5, samples=16 * at, tokens=1024 * at) for at in (1, 2, 4)]
    run = one([HEADER, *lines])
    assert curve(run, "samples_per_second").middle == (None, 32.0, 32.0)
    assert curve(run, "tokens_per_second").middle == (None, 2048.0, 2048.0)
    assert (run.axis.samples, run.axis.tokens) == ((16, 32, 64), (1024, 2048, 4096))


def test_the_history_of_a_scaler():
    header = replace(
        HEADER,
        scaler={
            "scale": 65536.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 0,
        },
    )
    scales = [65536.0, 32768.0, 32768.0, 65536.0, 65536.0]
    lines = [
        StepLine(step=at, loss_scale=scale, skipped=at == 0, growth_tracker=at, scaler=0)
        for at, scale in enumerate(scales)
    ]
    run = one([header, *lines])
    (scaler,) = run.scalers
    assert scaler.path.points == ((0.0, 65536.0), (1.0, 32768.0), (3.0, 65536.0))
    assert (scaler.path.changes, scaler.path.skips, scaler.growths, scaler.backoffs) == (3, (0,), 1, 1)
    assert (scaler.growth_tracker, scaler.arguments.growth_interval) == (4, 3)
    assert (run.skipped, run.skip_share, run.axis.skipped) == (1, 0.2, (1, 0, 0, 0, 0))


def test_each_optimizer_is_a_run_of_its_own():
    header = replace(HEADER, optimizers=("generator", "critic"))
    lines = [StepLine(step=at, loss=float(at % 2), optimizer=at % 2) for at in range(6)]
    runs = condensed([header, *lines, detail(1, 0.5)])
    assert [(run.optimizer, run.steps, bool(run.maps)) for run in runs] == [
        ("generator", 3, True),
        ("critic", 3, False),
    ]


def test_marks_and_what_was_lost():
    lines = [
        *steps(0, 3),
        CheckpointLine(step=1, path="c-1"),
        CheckpointLine(step=1, path="c-1", health="good"),
        LookLine(step=2, verdict="sick", bundle="bundle-2", model="my train.py"),
        ActionLine(step=2, action="skip", reason="the gradient is not finite"),
        LostLine(details=2),
        LostLine(details=5, steps=1, thinned=9),
    ]
    run = one([HEADER, *lines], lately=True)
    assert [(mark.path, mark.health) for mark in run.checkpoints] == [("c-1", "good")]
    assert (run.looks[0].bundle, run.looks[0].command) == (
        "runs/run/bundle-2",
        "ampdoctor bisect-nan runs/run/bundle-2 --model 'my train.py'",
    )
    assert (run.actions[0].action, run.lost, run.ending) == ("skip", 6, "running")


# -- heat maps --


def maps_of(lines, names=NAMES):
    maps = Maps()
    for line in lines:
        maps.add(line, names)
    return maps


def test_a_row_a_tensor_and_a_column_a_step():
    maps = maps_of([detail(0, 1.0, 2.0, zero_share=0.5), detail(10, 3.0), detail(20, None, 4.0)])
    norm, zeros = maps.heat_maps()
    assert (norm.name, norm.role, norm.steps, norm.tensors, norm.of) == ("norm", "gradient", (0, 10, 20), NAMES, 2)
    assert norm.values == ((1.0, 3.0, None), (2.0, None, 4.0))
    assert (zeros.name, zeros.values) == ("zero_share", ((0.5,), (0.5,)))


def test_calls_of_one_module_are_one_row_and_a_table_that_grows_or_changes_keeps_rows_by_name():
    maps = maps_of([detail(5, 1.0), detail(5, None, 2.0)])
    maps.add(DetailLine(step=6, tensors=detail(6, 1.0).tensors * 2), NAMES)
    maps.add(detail(7, 3.0, 4.0, 5.0), ("b.weight", "a.weight", "c.weight"))
    (norm,) = maps.heat_maps()
    assert norm.tensors == ("a.weight", "b.weight", "c.weight")
    assert norm.values == ((1.0, 1.0, 4.0), (2.0, None, 3.0), (None, None, 5.0))


def test_of_many_columns_the_worst_stay():
    draw = random.Random(1)
    lines = [detail(at, 2.0 ** draw.gauss(0, 0.1), 1.0, log2_headroom=8 + draw.random()) for at in range(5000)]
    lines[1234] = detail(1234, 1.0, 4096.0, log2_headroom=8.5)
    lines[4321] = detail(4321, 1.0, 1.0, log2_headroom=0.25)
    maps = maps_of(lines)
    norm, headroom = maps.heat_maps()
    assert len(norm.steps) <= MOST_COLUMNS
    assert norm.values[1][norm.steps.index(1234)] == 4096.0
    assert headroom.values[0][headroom.steps.index(4321)] == 0.25
    assert norm.steps == tuple(sorted(set(norm.steps)))
    assert len(maps.headroom) == 5000
    assert maps.headroom[4321] == 0.25


def test_of_many_rows_the_worst_stay_in_their_order():
    names = tuple(f"t{at}" for at in range(500))
    norms = [1.0] * 500
    lines = [detail(at, *norms) for at in range(3)]
    norms[77] = norms[401] = 1000.0
    norm = maps_of([*lines, detail(3, *norms)], names).heat_maps()[0]
    assert (len(norm.tensors), norm.of) == (MOST_ROWS, 500)
    assert {"t77", "t401"} <= set(norm.tensors)
    assert list(norm.tensors) == sorted(norm.tensors, key=lambda name: int(name[1:]))


def test_steps_that_were_undone_are_forgotten():
    maps = maps_of([detail(at, 1.0, log2_headroom=3.0) for at in range(5)])
    maps.forget_from(2)
    maps.add(detail(2, 9.0), NAMES)
    norm = maps.heat_maps()[0]
    assert (norm.steps, norm.values) == ((0, 1, 2), ((1.0, 1.0, 9.0),))
    assert set(maps.headroom) == {0, 1}
