"""However a process ends, the log is whole."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ampdoctor.evidence.log_records import EndLine, LostLine, StepLine
from ampdoctor.evidence.log_text import line_of
from tests.live.log.logs import lines, steps, texts, until

BEGIN = """
import os, signal, sys, time
from ampdoctor.evidence.log_records import DetailLine, TensorDetail
from ampdoctor.evidence.log_records import EndLine, RunLine, StepLine
from ampdoctor.live.log.thread import Limits
from ampdoctor.live.log.run_log import RunLog

log = RunLog(sys.argv[1], RunLine(name="script"), limits=Limits(file_bytes=200_000))
"""


def started(folder, script):
    command = [sys.executable, "-c", BEGIN + script, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(folder, script):
    process = started(folder, script)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_after_kill_9_every_line_but_the_last_is_whole(tmp_path):
    fast = """
tensors = tuple(TensorDetail(tensor=0, role="gradient", norm=1.0) for _ in range(50))
for step in range(10**9):
    log.write(StepLine(step=step, loss=1.0))
    if step % 50 == 0:
        log.write(DetailLine(step=step, tensors=tensors))
        time.sleep(0.0005)
"""
    process = started(tmp_path, fast)
    until((tmp_path / "log.2.jsonl").exists, seconds=60)
    process.kill()
    process.communicate()
    written = texts(tmp_path)
    for text in written[:-1]:
        assert line_of(text) is not None
    whole = [line for line in map(whole_or_none, written) if isinstance(line, StepLine)]
    assert [line.step for line in whole] == list(range(len(whole)))
    assert len(whole) > 1000


def whole_or_none(text):
    try:
        return line_of(text).line
    except ValueError:
        return None


def test_what_was_handed_over_a_second_ago_is_there_without_a_goodbye(tmp_path):
    script = """
for step in range(500):
    log.write(StepLine(step=step))
end = time.monotonic() + 1.0  # a fifth of that on a machine that has nothing else to do
while time.monotonic() < end:  # a loop that keeps Python busy
    pass
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert ended(tmp_path, script)[0] == -signal.SIGTERM
    assert steps(tmp_path) == list(range(500))


@pytest.mark.parametrize(
    ("last_words", "code"),
    [
        ("raise RuntimeError('the script fails')", 1),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); os.kill(os.getpid(), signal.SIGTERM)", 9),
    ],
)
def test_an_interpreter_that_ends_in_order_writes_all_of_it(tmp_path, last_words, code):
    script = f"""
import atexit
atexit.register(lambda: log.write(EndLine(steps=500)))
for step in range(500):
    log.write(StepLine(step=step))
{last_words}
"""
    assert ended(tmp_path, script)[0] == code
    assert steps(tmp_path) == list(range(500))
    assert isinstance(line_of(texts(tmp_path)[-1]).line, EndLine)


def test_a_forked_process_has_no_part_in_the_log(tmp_path):
    script = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for any fork beside a thread
for step in range(300):
    log.write(StepLine(step=step))
    if step % 100 == 50:
        child = os.fork()
        if child == 0:
            log.write(StepLine(step=10_000))
            log.describe(child=True)
            sys.exit(0 if not log.flush() and not log.close() else 5)  # runs what is registered for the exit
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.1)
"""
    assert ended(tmp_path, script) == (0, "", "")
    assert steps(tmp_path) == list(range(300))
    assert lines(tmp_path, LostLine) == []
    assert not (tmp_path / "run.json").exists()


def test_a_signals_handler_may_write(tmp_path):
    script = """
signal.signal(signal.SIGALRM, lambda *_: (log.write(StepLine(step=1)), log.index_of(str(time.monotonic()))))
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
end = time.monotonic() + 0.5
while time.monotonic() < end:
    log.write(StepLine(step=0))
    log.index_of(str(time.monotonic()))
    time.sleep(0.00005)
signal.setitimer(signal.ITIMER_REAL, 0)
print(log.close(20))
"""
    assert ended(tmp_path, script) == (0, "True\n", "")
    assert set(steps(tmp_path)) == {0, 1}


def test_the_log_needs_no_torch(tmp_path):
    script = "assert not {'torch', 'numpy'} & {name.partition('.')[0] for name in sys.modules}"
    assert ended(tmp_path, script) == (0, "", "")
