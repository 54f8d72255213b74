"""A sink that fails: one sentence, and the training goes on."""

from __future__ import annotations

import errno
import os
import threading
import time

from ampdoctor.evidence.log_records import StepLine
from ampdoctor.live.log import thread
from ampdoctor.live.log.run_log import RunLog
from tests.live.log.logs import HEADER, steps, until


def goes_on(log, said, *words):
    """The log is given up with one sentence, once, and nothing that is called afterwards raises or waits."""
    until(lambda: log.failed is not None)
    began = time.monotonic()
    for step in range(1000):
        log.write(StepLine(step=step))
        log.write(lambda: None)
    log.describe(late=True)
    log.head(precision="bf16")
    assert log.index_of("late") == 0
    assert (log.flush(10), log.close(10)) == (False, False)
    assert time.monotonic() - began < 5
    until(lambda: not log._writer.is_alive())
    (sentence,) = said
    assert sentence == log.failed
    assert sentence.startswith(f"the log {log.path} ends here: ")
    assert sentence.endswith("; the training goes on without it")
    for word in words:
        assert word in sentence


def test_a_full_disk(begin, said, tmp_path, monkeypatch):
    room = 700

    def write(file, data, really=os.write):
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = really(file, bytes(data)[:room])  # a disk that fills up takes a part
        room -= written
        return written

    monkeypatch.setattr(thread.os, "write", write)
    log = begin()
    for step in range(100):
        log.write(StepLine(step=step, loss=1.0))
    goes_on(log, said, "No space left on device")
    kept = steps(tmp_path)  # the line that was cut off was taken back
    assert kept == list(range(len(kept)))
    assert len(kept) > 2


def test_a_folder_that_cannot_be_made(begin, said, tmp_path):
    (tmp_path / "file").write_text("")
    goes_on(begin(folder=tmp_path / "file" / "log"), said, "Not a directory")


def test_a_close_waits_for_a_bounded_time_and_says_what_is_missing(begin, said, monkeypatch):
    go = threading.Event()
    log = begin()
    assert log.flush()
    monkeypatch.setattr(thread.os, "write", lambda _, data: go.wait(30) and len(data))
    for step in range(10):
        log.write(StepLine(step=step))
    began = time.monotonic()
    assert not log.close(0.3)
    assert time.monotonic() - began < 10
    assert said == [
        f"the log {log.path} ends here: its disk has not taken 10 lines within 0.3 s; the training goes on without it"
    ]
    go.set()


def test_a_thread_that_cannot_be_started(tmp_path, said, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    log = RunLog(tmp_path / "log", HEADER, say=said.append)
    log.write(StepLine(step=0))
    assert not log.close()
    assert said == [f"the log {log.path} ends here: can't start new thread; the training goes on without it"]


def test_an_error_of_our_own_ends_the_log_and_not_the_training(begin, said, monkeypatch):
    log = begin()
    assert log.flush()
    monkeypatch.setattr(log._tray, "take", lambda: 1 / 0, raising=False)
    goes_on(log, said, "ZeroDivisionError")
