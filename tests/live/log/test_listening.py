"""Listeners of a log: each hears every line in order, and none costs the training anything."""

from __future__ import annotations

import threading
import time

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.log_records import AlertLine, DetailLine, EndLine, RunLine, StepLine, TensorDetail
from ampdoctor.evidence.report import Finding
from ampdoctor.live.log.thread import Limits
from tests.live.log.logs import read, until

ALERT = Finding(
    code="AMP720", name="loss-spike", severity="warning", message="It rises.", where=Where(phase="optimizer")
)


def steps_of(heard):
    return [whole.line.step for whole in heard if isinstance(whole.line, StepLine)]


def test_a_listener_hears_what_is_written_in_its_order_on_a_thread_of_its_own(begin, tmp_path):
    heard, threads = [], set()

    def add(whole):
        heard.append(whole)
        threads.add(threading.get_ident())

    log = begin()
    log.listen(add)
    for step in range(500):
        log.write(StepLine(step=step, loss=1.0))
        if step % 100 == 0:
            tensors = tuple(TensorDetail(tensor=log.index_of(f"w{i}"), role="gradient") for i in range(70))
            log.write(DetailLine(step=step, tensors=tensors))
    log.write(EndLine(steps=500))
    assert log.close()
    written = read(tmp_path)
    assert heard[1:] == written or heard == written  # the header twice where it was written after the listener came
    assert heard[0].line.name == "test"
    assert steps_of(heard) == list(range(500))
    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident(), log._writer.ident})


def test_what_a_listener_answers_is_in_the_log_and_heard_by_the_others(begin, tmp_path):
    heard = []
    log = begin()

    def judge(whole):
        if isinstance(whole.line, StepLine) and whole.line.step == 99:
            time.sleep(0.2)  # it is still at it when the log is closed
            log.write(AlertLine(step=99, finding=ALERT))

    log.listen(heard.append)
    log.listen(judge, answers=True)
    for step in range(100):
        log.write(StepLine(step=step))
    assert log.close()
    for wholes in (heard, read(tmp_path)):
        assert [whole.line.step for whole in wholes if isinstance(whole.line, AlertLine)] == [99]


def test_the_end_is_called_after_the_last_line_and_idle_where_nothing_waits(begin):
    told = []
    log = begin()
    log.listen(
        lambda whole: told.append(type(whole.line).__name__),
        idle=lambda: told.append("idle"),
        end=lambda: told.append("end"),
    )
    until(lambda: "idle" in told)
    log.write(StepLine(step=0))
    log.close()
    assert told[-1] == "end"
    assert told.index("idle") < told.index("StepLine")
    assert told.count("end") == 1


def test_one_that_raises_is_dropped_with_one_sentence_and_the_others_hear_on(begin, said, tmp_path):
    heard = []
    log = begin()

    def add(whole):
        raise KeyError(whole.line.name)

    bad = log.listen(add, name="the export wandb=small")
    log.listen(heard.append)
    until(lambda: bad.failed)
    for step in range(100):
        log.write(StepLine(step=step))
    assert log.close()
    assert said == ["the export wandb=small ends here: KeyError: 'test'; the training goes on without it"]
    assert steps_of(heard) == steps_of(read(tmp_path)) == list(range(100))


def test_one_that_never_returns_costs_nothing(begin, said, tmp_path):
    go, heard = threading.Event(), []
    log = begin(limits=Limits(lines=150, listener_details=2, close_timeout=0.5))
    hung = log.listen(lambda _: go.wait(60), name="a sink")
    log.listen(heard.append)
    for step in range(400):
        log.write(StepLine(step=step))
        time.sleep(0.001)
    began = time.monotonic()
    assert log.close()
    assert time.monotonic() - began < 10
    assert said == ["a sink ends here: it has not finished within 0.5 s; the training goes on without it"]
    assert hung.dropped > 10
    assert steps_of(heard) == steps_of(read(tmp_path)) == list(range(400))
    go.set()


def test_of_lines_that_come_too_fast_the_oldest_go_and_the_names_stay(begin):
    go, heard = threading.Event(), []
    log = begin(limits=Limits(lines=50, listener_details=3))

    begun = threading.Event()

    def add(whole):
        begun.set()
        go.wait(30)
        heard.append(whole)

    assert log.flush()  # the file's own header is written: the listener does not get it
    slow = log.listen(add)
    assert begun.wait(10)
    log.index_of("layer.weight")
    for step in range(200):
        log.write(StepLine(step=step))
        log.write(DetailLine(step=step))
        log.flush()
    go.set()
    log.close()
    assert steps_of(heard) == list(range(150, 200))
    assert [whole.line.step for whole in heard if isinstance(whole.line, DetailLine)] == [197, 198, 199]
    order = [whole.line.step for whole in heard if not isinstance(whole.line, RunLine)]
    assert order[-6:] == [197, 197, 198, 198, 199, 199]
    assert ("layer.weight",) in [whole.line.tensors for whole in heard[1:] if isinstance(whole.line, RunLine)]
    assert slow.dropped == 200 + 200 + 1 - 50 - 3  # with the header, whose names were kept nevertheless


def test_a_listener_may_close_the_log(begin):
    closed = []
    log = begin()
    log.listen(lambda _: closed.append(log.close()))
    until(lambda: closed)
    assert set(closed) == {True}
