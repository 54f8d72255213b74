"""What is kept of a log that goes on."""

from __future__ import annotations

import math

from ampdoctor.cli.follow import event_line
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.log_records import (
    ActionLine,
    AlertLine,
    CheckpointLine,
    DetailLine,
    EndLine,
    LogRecord,
    LookLine,
    RunLine,
    Stamp,
    StepLine,
    TensorDetail,
)
from ampdoctor.evidence.report import Finding
from ampdoctor.health.latest import Latest, Rates


class Log:
    """Hands lines over, 100 ms after each other."""

    def __init__(self, **options):
        self.latest, self.time, self.stamp = Latest(**options), 0, {"run_id": "r"}

    def put(self, *lines):
        happened = []
        for line in lines:
            self.time += 100
            happened += self.latest.add(LogRecord(Stamp(time_ms=self.time, **self.stamp), line))
        return happened


def step(number, **fields):
    return StepLine(**{"step": number, "loss": 2.0, "gradient_norm": 1.0, **fields})


def test_rates_are_of_the_last_steps():
    log = Log()
    assert log.latest.rates == Rates()
    log.put(*(step(n, tokens=50 * n, samples=5 * n, seconds=0.1, data_seconds=0.025) for n in range(100)))
    rates = log.latest.rates
    found = [round(rate, 6) for rate in (rates.steps, rates.samples, rates.tokens, rates.data_share)]
    assert found == [10, 50, 500, 0.25]
    log.put(step(100))
    assert log.latest.rates.tokens is None


def test_a_rollback_undoes_steps_and_their_skips():
    log = Log()
    log.put(*(step(number, skipped=number in {2, 7}) for number in range(10)))
    assert log.latest.skipped == 2
    log.stamp = {"run_id": "r", "attempt": 1, "branch": 0}
    happened = log.put(step(5))
    assert [event.kind for event in happened] == ["attempt"]
    assert ([line.step for line in log.latest.steps], log.latest.skipped) == ([0, 1, 2, 3, 4, 5], 1)


def test_another_run_begins_from_nothing_and_an_end_is_none_if_a_restart_follows():
    log = Log()
    log.put(step(0), EndLine(exit_code=1))
    assert log.latest.end.exit_code == 1
    log.stamp = {"run_id": "r", "restarts": 1}
    log.put(step(1))
    assert log.latest.end is None
    log.stamp = {"run_id": "other"}
    assert [event.kind for event in log.put(step(0))] == ["run"]
    assert [line.step for line in log.latest.steps] == [0]


def detail(number, role="gradient", **fields):
    return TensorDetail(tensor=number, role=role, **fields)


def test_the_worst_of_the_last_look():
    log = Log()
    log.put(
        RunLine(name="n", tensors=("a", "b", "c")),
        DetailLine(step=0, tensors=(detail(0, flushed_share=0.9),)),
        DetailLine(step=9, tensors=(detail(0, flushed_share=0.1, log2_headroom=7.0), detail(1, flushed_share=0.0))),
        DetailLine(step=9, tensors=(detail(2, flushed_share=0.3, log2_headroom=-1.0), detail(5, zero_share=0.2))),
        DetailLine(step=9, tensors=(detail(1, "activation", zero_share=0.7, log2_headroom=3.0),)),
    )
    assert log.latest.detail_step == 9
    assert log.latest.worst("flushed_share", 5) == [("c", "gradient", 0.3), ("a", "gradient", 0.1)]
    assert log.latest.worst("log2_headroom", 2) == [("c", "gradient", -1.0), ("b", "activation", 3.0)]
    assert log.latest.worst("zero_share", 5) == [("tensor 5", "gradient", 0.2)]  # a ReLU's zeros are its work


def test_an_alert_is_told_once_whoever_has_judged():
    """What a loss that is not finite is called is the judge's; the live one has written it into the log as well."""
    log, again = Log(), Log()
    calm = [step(number, loss=2.0 + 0.01 * (number % 7)) for number in range(200)]
    log.put(*calm)
    sick = step(200, loss=math.inf, skipped=False)
    (event,) = log.put(sick)
    assert (event.kind, event.level, event.step) == ("alert", "error", 200)
    assert [finding.code for finding in log.latest.findings] == [event.says.split()[0]]
    again.put(*calm, AlertLine(step=200, finding=log.latest.findings[0]))
    assert again.put(sick) == []
    assert len(again.latest.findings) == 1


def test_what_happens_is_said_in_a_sentence():
    log = Log()
    finding = Finding(
        code="AMP201", name="n", severity="error", where=Where(phase="forward"), message="step 3: Inf is born."
    )
    happened = log.put(
        LookLine(step=3, verdict="sick", findings=(finding,), bundle="bundle-3"),
        ActionLine(step=3, action="stop", reason="it was asked for"),
        CheckpointLine(step=4, path="a.pt", health="good"),
        EndLine(exit_code=1, reason="StoppedError"),
    )
    assert [(event.kind, event.level, event.says) for event in happened] == [
        ("look", "error", "sick: Inf is born. (bundle-3)"),
        ("action", "warning", "stop: it was asked for"),
        ("checkpoint", "good", "a.pt is good"),
        ("end", "error", "the training has ended with code 1 (StoppedError)"),
    ]
    assert event_line(happened[0]) == "step 3  looked at: sick: Inf is born. (bundle-3)"
