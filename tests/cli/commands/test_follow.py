"""`ampdoctor health LOG --follow`: in a real pseudo-terminal, and where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from pathlib import Path

import pytest

from ampdoctor.cli import follow as followed
from ampdoctor.cli.follow import view
from ampdoctor.cli.main import main
from ampdoctor.evidence.log_records import (
    CheckpointLine,
    DetailLine,
    EndLine,
    LogRecord,
    RunLine,
    Stamp,
    StepLine,
    TensorDetail,
)
from ampdoctor.evidence.log_text import text_of
from ampdoctor.health.latest import Latest

ROOT = Path(__file__).parents[3]
NOW = 1_800_000_000


class Log:
    """A log that a test lets grow."""

    def __init__(self, folder, name="small"):
        self.folder, self.name, self.step, self.number = Path(folder), name, 0, 0
        self.folder.mkdir(exist_ok=True)
        self.begin()

    def put(self, *lines):
        with (self.folder / "log.jsonl").open("a") as file:
            for line in lines:
                stamp = Stamp(run_id="r", time_ms=NOW * 1000 + self.step * 100)
                file.write(text_of(LogRecord(stamp, line)))

    def begin(self):
        if self.number:
            (self.folder / "log.jsonl").rename(self.folder / f"log.{self.number}.jsonl")
        self.number += 1
        self.put(RunLine(name=self.name, segment=self.number, tensors=("net.0.weight", "net.\x1b[2J.bias")))

    def steps(self, count, **fields):
        for _ in range(count):
            loss = 2.0 + 0.01 * (self.step % 7)
            self.put(StepLine(**{"step": self.step, "loss": loss, "gradient_norm": 1.0, "skipped": False, **fields}))
            self.step += 1


class Terminal:
    """A pseudo-terminal with a command in it."""

    def __init__(self, *arguments, columns=100, lines=30, env=()):
        self.main, self.other = pty.openpty()
        self.resize(columns, lines)
        clean = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ampdoctor", *map(str, arguments)],
            stdin=self.other,
            stdout=self.other,
            stderr=self.other,
            env={**clean, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", **dict(env)},
            start_new_session=True,
        )
        self.seen = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.main)
        os.close(self.other)

    def resize(self, columns, lines):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, seconds=0.1):
        while select.select([self.main], [], [], seconds)[0]:
            self.seen += os.read(self.main, 65536).decode("utf-8", "replace")
            seconds = 0.0
        return self.seen

    def until(self, shows, seconds=60.0):
        """Wait until the picture shows something."""
        end = time.monotonic() + seconds
        while not shows(self.picture()):
            self.read()
            assert time.monotonic() < end, f"it does not come; last was:\n{self.picture()}\n{self.seen[-2000:]!r}"
        return self.picture()

    def picture(self):
        """The lines of the last whole frame."""
        frames = self.seen.split("\x1b[H")
        return plain(frames[-1] if len(frames) > 1 else "")

    def ends(self, seconds=60.0):
        """The exit code, and what is on the first screen afterwards."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < end, "it does not end"
        self.read()
        return self.process.returncode, plain(self.seen.rpartition("\x1b[?1049l")[2])


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").split("\n")


def has(text):
    return lambda lines: any(text in line for line in lines)


def test_a_training_is_seen_from_before_its_log_to_its_end(tmp_path):
    """It appears late, grows, rotates, the window is drawn narrower and wider, and the end is a report."""
    folder = tmp_path / "run"
    with Terminal("health", folder, "--follow") as terminal:
        terminal.until(has("waiting for its"))
        log = Log(folder)
        log.steps(40)
        log.put(DetailLine(step=39, tensors=(TensorDetail(tensor=1, role="gradient", flushed_share=0.25),)))
        lines = terminal.until(has("25.00% net.\\x1b[2J.bias grad"))
        assert any(line.startswith("step 39 ") for line in lines)
        assert lines[0].startswith("small")
        terminal.resize(44, 8)
        narrow = terminal.until(lambda lines: len(lines) == 8 and max(map(len, lines)) <= 44)
        assert has("gradient norm")(narrow)
        log.steps(5)
        log.begin()
        log.steps(5)
        terminal.until(has("step 49"))
        terminal.resize(130, 40)
        terminal.until(lambda lines: len(lines) == 40 and has("step 49")(lines))
        log.steps(1, loss=float("inf"))
        log.put(CheckpointLine(step=50, path="a.pt", health="sick", reason="it was saved after step 50"))
        terminal.until(has("step 50  error: AMP722"))
        terminal.until(has("a.pt is sick: it was saved after step 50"))
        log.put(EndLine(exit_code=0, steps=51))
        code, after = terminal.ends()
    assert code == 1
    assert has("small  ended")(after)  # what the picture was in the end, and the report
    assert any(line.startswith("verdict: sick") for line in after)
    assert "\x1b[2J.bias" not in terminal.seen


def test_ctrl_c_gives_the_terminal_back(tmp_path):
    log = Log(tmp_path / "run")
    log.steps(3)
    with Terminal("health", tmp_path / "run", "--follow") as terminal:
        terminal.until(has("step 2"))
        terminal.process.send_signal(signal.SIGINT)
        code, after = terminal.ends()
    assert code == 130
    assert terminal.seen.count("\x1b[?1049h") == terminal.seen.count("\x1b[?1049l") == 1
    assert terminal.seen.count("\x1b[?25h") >= terminal.seen.count("\x1b[?25l")  # the cursor is there again
    assert has("step 2")(after)
    assert has("ampdoctor: interrupted")(after)
    assert "Traceback" not in terminal.seen


def test_a_terminal_that_cannot_draw_gets_lines(tmp_path):
    log = Log(tmp_path / "run")
    log.steps(3)
    log.put(EndLine(exit_code=0))
    with Terminal("health", tmp_path / "run", "--follow", env={"TERM": "dumb"}) as terminal:
        code, _ = terminal.ends()
    assert code == 0
    assert "\x1b[" not in terminal.seen
    assert "step 2  loss 2.02" in terminal.seen


def run(monkeypatch, *arguments, turns):
    """Run the command in process; what it waits for happens turn by turn."""
    left = deque(turns)

    def pause(_seconds):
        assert left, "it should have ended"
        left.popleft()()

    monkeypatch.setattr(followed.follow, "__kwdefaults__", {**followed.follow.__kwdefaults__, "pause": pause})
    code = main(["health", *map(str, arguments), "--follow"])
    assert not left, "it has ended too early"
    return code


def test_lines_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    made = []

    def begins():
        made.append(Log(folder))
        made[0].steps(30)

    def grows():
        made[0].steps(250)

    def falls_sick():
        made[0].steps(1, loss=float("nan"))

    def ends():
        made[0].put(EndLine(exit_code=0, steps=281))

    code = run(monkeypatch, folder, turns=[begins, grows, falls_sick, ends])
    out, err = capsys.readouterr()
    before, report = out.split("ampdoctor health: ")
    lines = before.splitlines()
    said = [int(re.match(r"step (\d+)  loss", line)[1]) for line in lines if "  loss " in line]
    assert said == [29, 129, 229, 280]
    assert next(line for line in lines if "AMP722" in line).startswith("step 280  error: AMP722")
    assert lines[-2] == "end: the training has ended with code 0"
    assert "verdict: sick" in report
    assert code == 1
    assert err.count(f"ampdoctor: waiting for a log at {folder}") == 1


def test_a_report_for_programs_has_standard_output_for_itself(tmp_path, monkeypatch, capsys, check_report):
    log = Log(tmp_path / "run")
    log.steps(3)
    code = run(
        monkeypatch, tmp_path / "run", "--format", "json", turns=[lambda: log.put(EndLine(exit_code=0, steps=3))]
    )
    out, err = capsys.readouterr()
    assert check_report(out)["command"] == "health"
    assert "step 2  loss 2.02" in err
    assert code == 0


def test_one_log_at_a_time(tmp_path, capsys):
    assert main(["health", "a", "b", "--follow"]) == 2
    assert "--follow takes one LOG, and 2 were given" in capsys.readouterr().err


def latest_of(*lines):
    latest = Latest()
    for at, line in enumerate(lines):
        latest.add(LogRecord(Stamp(run_id="r", time_ms=NOW * 1000 + at * 100), line))
    return latest


FULL = latest_of(
    RunLine(
        name="a \u202erun", precision="fp16", tensors=tuple(f"model.layers.{i}.attention.weight" for i in range(20))
    ),
    *(
        StepLine(
            step=step,
            loss=2.0,
            gradient_norm=1.0,
            loss_scale=65536.0,
            learning_rates=(1e-3,),
            skipped=step == 7,
            seconds=0.1,
            data_seconds=0.03,
            memory_bytes=3 * 10**9,
            tokens=1000 * step,
        )
        for step in range(300)
    ),
    DetailLine(
        step=200,
        tensors=tuple(
            TensorDetail(tensor=i, role="gradient", flushed_share=i / 40, log2_headroom=20.0 - i, zero_share=i / 50)
            for i in range(20)
        ),
    ),
    *(CheckpointLine(step=step, path=f"/some/where/{step}.pt", health="good") for step in (100, 200)),
)


@pytest.mark.parametrize("width", [20, 80, 250])
def test_a_picture_is_as_large_as_its_window_and_no_larger(width):
    for height in (1, 8, 24):
        text = view(FULL, name="x", width=width, height=height, now=NOW + 40.0).plain
        lines = text.split("\n")
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert "a \\u202erun"[:width] in lines[0]
        if height >= 24 and width >= 120:
            facts = "step 299  10 steps/s  10,000 tokens/s  30% of it waiting for data  3 GB of memory at most"
            assert facts in lines[1]
            assert "47.50% model.layers.19.attention.weight grad" in text
            assert "2^1.0" in text
            assert "/some/where/200.pt is good" in text
        assert all(line.isprintable() for line in lines)


def test_silence_is_said():
    assert "silent for 2 min" in view(FULL, name="x", width=80, height=5, now=NOW + 150.0).plain
    assert "running" in view(FULL, name="x", width=80, height=5, now=NOW + 40.0).plain
