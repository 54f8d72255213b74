from __future__ import annotations

import math

import pytest

from ampdoctor.evidence.log_records import EndLine, RunLine, StepLine
from ampdoctor.health.reading.log_kind import Row, StepOrder, lines_of, milliseconds


def read(*rows, **more):
    lines = lines_of((Row(step, dict(values)) for step, values in rows), RunLine(name="run"), StepOrder(), **more)
    return list(lines)


def steps(*rows):
    found = [(one.stamp.attempt, one.line) for one in read(*rows) if isinstance(one.line, StepLine)]
    return [(attempt, line.step, line.loss, line.gradient_norm) for attempt, line in found]


def test_rows_of_one_step_become_one_and_a_late_row_adds_to_its_step():
    rows = [(1, {"loss": 2.0}), (1, {"gradient_norm": 0.5}), (2, {"loss": 1.5}), (1, {"learning_rate": 0.1})]
    assert steps(*rows) == [(0, 1, 2.0, 0.5), (0, 2, 1.5, None)]
    assert read(*rows)[1].line.learning_rates == (0.1,)


def test_a_step_that_falls_back_with_another_loss_is_the_next_attempt():
    rows = [(1, {"loss": 2.0}), (2, {"loss": 1.5}), (3, {"loss": 1.0}), (2, {"loss": 1.6}), (3, {"loss": 1.1})]
    assert steps(*rows) == [
        (0, 1, 2.0, None),
        (0, 2, 1.5, None),
        (0, 3, 1.0, None),
        (1, 2, 1.6, None),
        (1, 3, 1.1, None),
    ]


def test_rows_without_a_number_of_the_training_are_left_out():
    assert steps((1, {"learning_rate": 0.1}), (2, {"loss": math.inf})) == [(0, 2, math.inf, None)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e30])
def test_a_count_that_is_none_is_not_known(bad):
    (line,) = [
        one.line for one in read((1, {"loss": 1.0, "tokens": bad, "samples": 8.0})) if isinstance(one.line, StepLine)
    ]
    assert (line.tokens, line.samples) == (None, 8)


@pytest.mark.parametrize("step", [-1, 2**53, 10**400])
def test_a_number_that_is_no_steps_makes_no_line(step):
    assert steps((1, {"loss": 2.0}), (step, {"loss": 1.0}), (2, {"loss": 1.5})) == [
        (0, 1, 2.0, None),
        (0, 2, 1.5, None),
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1.5, 1500), (math.inf, 0), (math.nan, 0), (1e306, 0), (10**400, 0), ("1", 0), (None, 0)]
)
def test_a_time_that_is_none_is_not_known(seconds, expected):
    assert milliseconds(seconds) == expected


def test_the_end_is_said_where_the_log_says_it():
    assert isinstance(read((1, {"loss": 1.0}), ended=EndLine)[-1].line, EndLine)
