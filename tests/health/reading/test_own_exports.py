"""What ampdoctor has exported is a log that it reads again."""

from __future__ import annotations

import math

from ampdoctor.evidence.log_records import StepLine
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log
from ampdoctor.health.sinks.export import export, export_of
from ampdoctor.health.sinks.metrics import PREFIX, Projection, Row
from ampdoctor.workflows.health import health
from tests.health.logs import HEADER, stamped
from tests.health.reading.test_event_files import field, record, scalar


def a_run():
    for step in range(200):
        line = StepLine(
            step=step,
            loss=math.nan if step > 150 else 2.0,
            gradient_norm=0.5,
            loss_scale=2.0**16 if step < 40 else 2.0**15,
            skipped=step == 40,
            learning_rates=(0.001,),
            seconds=0.25,
            samples=512 * step,
        )
        yield stamped(line)


def of_the_log(path):
    found = find_log(path)
    lines = [one.line for one in found.lines(ReadIssues()) if isinstance(one.line, StepLine)]
    return [
        (one.step, one.loss_scale, one.skipped, one.seconds, one.samples, one.gradient_norm) for one in lines
    ], lines


WANTED = [(at, 2.0**16 if at < 40 else 2.0**15, at == 40, 0.25, 512 * at, 0.5) for at in range(200)]


def test_event_files_of_tensorboard(tmp_path):
    projection, events = Projection(), b""
    for whole in [stamped(HEADER), *a_run()]:
        for row in projection.of(whole):
            assert isinstance(row, Row)
            values = b"".join(scalar(f"{PREFIX}/{name}", value) for name, value in row.values.items())
            events += record(field(1, row.time_ms / 1000) + field(2, row.step) + field(5, values))
    (tmp_path / "tb" / "small").mkdir(parents=True)
    (tmp_path / "tb" / "small" / "events.out.tfevents.1.host").write_bytes(events)
    figures, lines = of_the_log(tmp_path / "tb")
    assert figures == WANTED
    assert [line.step for line in lines if math.isnan(line.loss)] == list(range(151, 200))
    report = health([tmp_path / "tb"])
    assert {(one.code, one.where.step) for one in report.findings} == {("AMP722", 151)}


def test_tables(tmp_path):
    export([stamped(HEADER), *a_run()], [export_of(f"csv={tmp_path / 'numbers'}")])
    figures, _ = of_the_log(tmp_path / "numbers")
    assert figures == [(*one[:2], None, *one[3:]) for one in WANTED]  # the skips stand in others.csv
