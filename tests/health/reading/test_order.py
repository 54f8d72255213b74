from __future__ import annotations

import json
import math
import random

import pytest

from ampdoctor.workflows.health import health


def row(step, loss=None, **more):
    return {"step": step, "loss": 5.0 - step / 1000 if loss is None else loss, **more}


def judged(tmp_path, rows):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return health([tmp_path / "log.jsonl"])


def left_out(report):
    return [(one.what, one.reason) for one in report.skipped]


RUN = [row(step) for step in range(300)]
OTHER = [row(step, 5.0 if step < 200 else math.nan) for step in range(300)]
SHUFFLED = random.Random(0).sample(RUN, len(RUN))


@pytest.mark.parametrize(
    "rows",
    [
        [one for pair in zip(RUN, OTHER, strict=True) for one in pair],
        [one for pair in zip(RUN[100:], OTHER, strict=False) for one in pair],
        SHUFFLED,
        RUN[::-1],
    ],
)
def test_a_log_whose_rows_are_out_of_order_is_not_judged_healthy(tmp_path, rows):
    report = judged(tmp_path, rows)
    assert report.verdict in {"inconclusive", "sick"}
    assert not report.complete
    (error,) = report.errors
    assert (error.what, error.kind) == ("log.jsonl", "out_of_order")
    assert "sort them" in error.message
    assert "own file" in error.message
    assert [what.split()[1:] for what, _ in left_out(report)] == [["rows", "of", "steps"]]


def test_rows_that_are_there_twice_are_counted_and_nothing_is_lost(tmp_path):
    report = judged(tmp_path, [one for one in RUN for _ in range(2)])
    assert (report.verdict, report.complete) == ("healthy", True)
    assert left_out(report) == [("300 rows of steps", "a later row repeats or precedes each of them")]


def test_a_row_in_another_place_undoes_what_follows_its_step(tmp_path):
    report = judged(tmp_path, [*RUN[:100], RUN[50], *RUN[100:]])
    assert report.complete
    assert left_out(report) == [("50 rows of steps", "a later row repeats or precedes each of them")]
    assert left_out(judged(tmp_path, [*RUN[:51], row(50, 4.0), *RUN[51:]])) == [
        ("a row of a step", "a later row repeats or precedes it")
    ]


@pytest.mark.parametrize(
    "rows",
    [
        RUN,
        [*RUN[:200], *RUN[100:180], *RUN[100:190], *RUN[100:]],
        [*RUN[:200], *RUN[198:]],
        [*RUN[:200], *RUN[100::10]],
        [*RUN, *RUN],
        # two rows that say different things of one step, and a norm that comes after the next step's loss
        [one for step in range(100) for one in (row(step), {"step": step, "grad_norm": 0.5})],
        [row(0), *(one for step in range(1, 100) for one in (row(step), {"step": step - 1, "grad_norm": 0.5}))],
    ],
)
def test_restarts_and_rows_that_add_to_a_step_are_in_order(tmp_path, rows):
    report = judged(tmp_path, rows)
    assert (report.verdict, report.complete, report.skipped) == ("healthy", True, ())
