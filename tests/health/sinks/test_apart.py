"""A sink in a process of its own: whatever becomes of it, the training neither waits nor fails."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ampdoctor.evidence.log_records import RunLine, StepLine
from ampdoctor.health.sinks.export import Apart, export, export_of
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.live.log.thread import Limits
from ampdoctor.workflows.log_listeners import export_while_it_runs
from tests.health.sinks.lines import a_run
from tests.live.log.logs import until

ROOT = str(Path(__file__).parents[3])


@pytest.fixture
def said():
    return []


@pytest.fixture
def begin(tmp_path, said):
    begun = []

    def make(*exports, **limits):
        log = RunLog(tmp_path / "log", RunLine(name="small"), say=said.append, limits=Limits(**limits))
        begun.append(log)
        export_while_it_runs(log, [export_of(text) for text in exports])
        return log

    yield make
    for log in begun:
        log.close()


def steps_in(folder):
    with (folder / "steps.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def process_of(log, which=0):
    return log._writer.listeners[which]._on_line.__self__._process


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_goes_through_a_pipe_is_what_is_written_here(tmp_path):
    far = Apart(export_of(f"csv={tmp_path / 'far'}"))
    for whole in a_run():
        far.add(whole)
    far.close()
    export(a_run(), [export_of(f"csv={tmp_path / 'here'}")])
    for name in ("steps.csv", "others.csv", "alerts.csv"):
        assert (tmp_path / "far" / name).read_text() == (tmp_path / "here" / name).read_text()
    assert steps_in(tmp_path / "far") == list(range(10))


def test_a_log_that_is_exported_while_it_grows(begin, tmp_path, said):
    log = begin(f"csv={tmp_path / 'out'}", f"openmetrics={tmp_path / 'run.prom'}")
    for step in range(300):
        log.write(StepLine(step=step, loss=1.0))
    assert log.close()
    assert steps_in(tmp_path / "out") == list(range(300))
    assert 'ampdoctor_step_total{run="small"} 300.0\n' in (tmp_path / "run.prom").read_text()
    assert said == []


def test_one_that_dies_is_dropped_with_one_sentence(begin, tmp_path, said):
    log = begin(f"csv={tmp_path / 'out'}")
    log.write(StepLine(step=0))
    until((tmp_path / "out" / "alerts.csv").exists, seconds=60)
    process_of(log).kill()

    def said_something():
        log.write(StepLine(step=1))
        return said

    until(said_something)
    assert log.close()
    (sentence,) = said
    assert sentence.endswith("ends here: its process has ended with code -9; the training goes on without it")


def test_one_whose_library_never_comes_back_is_ended_with_its_process(begin, tmp_path, monkeypatch, said):
    """As one that asks a server which does not answer."""
    (tmp_path / "wandb.py").write_text("import time\ntime.sleep(1e6)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    log = begin("wandb=hung", close_timeout=1.0)
    log.write(StepLine(step=0))
    until(lambda: process_of(log) is not None)
    pid = process_of(log).pid
    assert log.close()
    assert said == ["the export wandb=hung ends here: it has not finished within 1 s; the training goes on without it"]
    until(lambda: is_gone(pid))


TRAINING = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for any fork beside a thread
from ampdoctor.evidence.log_records import RunLine, StepLine
from ampdoctor.health.sinks.export import export_of
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.workflows.log_listeners import export_while_it_runs

log = RunLog(sys.argv[2] + "/log", RunLine(name="script"), say=print)
export_while_it_runs(log, [export_of("csv=" + sys.argv[2] + "/out")])
for step in range(100):
    log.write(StepLine(step=step))
while not os.path.exists(sys.argv[2] + "/out/alerts.csv"):
    time.sleep(0.05)
far = log._writer.listeners[0]._on_line.__self__._process.pid
"""


def training(tmp_path, script):
    command = [sys.executable, "-c", TRAINING + script, ROOT, str(tmp_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("last_words", "code"), [("time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(3)", 3)]
)
def test_however_the_training_ends_the_sink_finishes_and_goes(tmp_path, last_words, code):
    process = training(tmp_path, f"print(far, flush=True)\n{last_words}")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, "")
    until(lambda: is_gone(int(out)), seconds=30)
    assert steps_in(tmp_path / "out") == list(range(100))


def test_a_forked_process_that_outlives_the_training_keeps_no_sink(tmp_path):
    script = """
child = os.fork()
if child == 0:
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
print(far, child, flush=True)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    out, _ = training(tmp_path, script).communicate(timeout=120)
    far, child = map(int, out.split())
    try:
        until(lambda: is_gone(far), seconds=30)
        assert not is_gone(child)
        assert steps_in(tmp_path / "out") == list(range(100))
    finally:
        os.kill(child, signal.SIGKILL)


def test_ctrl_c_is_for_the_training(tmp_path):
    script = """
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
print(far, flush=True)
os.killpg(0, signal.SIGINT)
log.write(StepLine(step=100))
"""
    command = [sys.executable, "-c", TRAINING + script, ROOT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, start_new_session=True)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[1:]) == (0, "", ["asked"])
    assert steps_in(tmp_path / "out") == list(range(101))


def test_one_that_is_abandoned_leaves_no_process_and_no_pipe(tmp_path):
    far = Apart(export_of(f"csv={tmp_path}"))
    far.add(next(a_run()))
    process = far._process
    far.abandon()
    assert process.returncode is not None
    assert process.stdin.closed
    assert process.stdout.closed
