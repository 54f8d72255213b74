"""What only a real process shows: exit codes, streams, signals, closed pipes, start-up."""

from __future__ import annotations

import os
import platform
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DRIVER = ROOT / "tests" / "cli" / "drive.py"


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("crash", "internal error: ZeroDivisionError: float division\\x1b[31m by zero"),
        ("refuse", "error: x is refused"),
        ("user", "error: the factory raised ValueError: no\nTraceback:\n  File 'run.py', line 3\nValueError: no"),
        ("exit", "the code under examination ended the process with 1"),
        ("mute", "internal error: MuteError, which raises where its message is read\nThis is not a finding."),
    ],
)
def test_a_failure_is_never_a_finding(behaviour, sentence, behaving, typed):
    behaving(behaviour)
    result = typed("scan", "x")
    assert result.returncode == 2
    assert result.stdout == ""
    assert sentence in result.stderr


def test_an_interrupt_that_comes_out_as_another_error_is_one(behaving, typed):
    behaving("import interrupted")
    result = typed("scan", "x", "-vv")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "ampdoctor: interrupted\n")


def test_a_crash_shows_its_traceback_only_when_asked(behaving, typed):
    behaving("crash")
    assert "Traceback" not in typed("scan", "x", "-v").stderr
    loud = typed("scan", "x", "-vv")
    assert "Traceback" in loud.stderr
    assert "in behave" in loud.stderr
    assert loud.returncode == 2


@pytest.mark.parametrize("arguments", [["sick", "scan", "x"], ["sick", "--help"]])
def test_a_reader_that_has_gone_is_not_a_finding(arguments, drive):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = drive(*arguments, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert result.returncode == 2
    assert result.stderr == ""


def test_closed_streams_are_no_crash(python, run_cli):
    closed_out = run_cli("-c", f"{python} {DRIVER} sick scan x >&-", command=("bash",))
    assert (closed_out.returncode, "standard output is closed" in closed_out.stderr) == (2, True)
    closed_err = run_cli("-c", f"{python} {DRIVER} sick scan x 2>&-", command=("bash",))
    assert closed_err.returncode == 1
    assert "AMP201" in closed_err.stdout


@pytest.mark.parametrize(
    ("env", "arguments", "coloured"),
    [
        ({}, [], False),
        ({"FORCE_COLOR": "1"}, [], True),
        ({}, ["--color", "always"], True),
        ({"TERM": "dumb"}, ["--color", "always"], True),
    ],
)
def test_colour_off_a_terminal(env, arguments, coloured, typed, behaving):
    behaving("sick")
    shown = typed("scan", "x", *arguments, env=env).stdout
    assert ("\x1b[31m" in shown or "\x1b[1;31m" in shown) == coloured


def on_terminal(drive, *arguments, env):
    """Run with stdout and stderr on a pseudo-terminal; return the exit code and everything shown."""
    main_end, terminal = pty.openpty()
    try:
        result = drive(*arguments, capture_output=False, stdout=terminal, stderr=terminal, text=False, env=env)
        os.close(terminal)
        seen = b""
        while True:
            try:
                part = os.read(main_end, 65536)
            except OSError:  # Linux says so when the other end has closed
                break
            if not part:
                break
            seen += part
    finally:
        os.close(main_end)
    return result.returncode, seen.decode()


@pytest.mark.parametrize(("env", "coloured"), [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal(env, coloured, drive):
    code, seen = on_terminal(drive, "sick", "scan", "x", env=env)
    assert code == 1
    assert ("31m" in seen) == coloured
    assert ("\x1b[" in seen) == (env["TERM"] != "dumb")  # bold is no colour


@pytest.mark.parametrize(
    ("term", "arguments", "visible"), [("xterm", [], True), ("xterm", ["-q"], False), ("dumb", [], False)]
)
def test_progress_on_a_terminal(term, arguments, visible, drive):
    if not visible:
        # The behaviour calls progress, which is None here: the workflow must be told so, and this one then crashes.
        code, seen = on_terminal(drive, "progress", "scan", "x", *arguments, env={"TERM": term})
        assert code == 2
        assert "internal error: TypeError" in seen
        return
    code, seen = on_terminal(drive, "progress", "scan", "x", env={"TERM": term, "NO_COLOR": "1"})
    assert code == 0
    assert re.search(r" \d+/100 \S+ tensors\\x1b\[2J", seen)
    assert seen.count("\x1b[2K") < 40
    assert seen.index("verdict: ") > seen.rindex("\x1b[2K")


def test_width_off_a_terminal_is_200_and_columns_is_honoured(typed, behaving):
    behaving("sick")
    wide = typed("scan", "x", "-v").stdout
    assert 120 < max(map(len, wide.splitlines())) <= 200
    narrow = typed("scan", "x", env={"COLUMNS": "60"}).stdout
    prose = [line for line in narrow.splitlines() if "ampdoctor.apply(" not in line]  # code to copy is never folded
    assert max(map(len, prose)) <= 60


@pytest.mark.parametrize("columns", ["3", "²", "5000"])
def test_columns_that_no_report_fits_are_ignored(columns, typed, behaving):
    behaving("sick")
    shown = typed("scan", "x", env={"COLUMNS": columns, "LINES": columns})
    assert (shown.returncode, shown.stdout) == (1, typed("scan", "x").stdout)


COMPLETING = {"COMP_WORDS": "ampdoctor scan --fo", "COMP_CWORD": "2", "_AMPDOCTOR_COMPLETE": "complete_bash"}


@pytest.mark.parametrize(("arguments", "env"), [(["--help"], {}), (["scan", "-h"], {}), ([], COMPLETING)])
def test_help_and_completion_need_nothing_heavy(arguments, env, run_cli):
    """Their time is that of their imports, which hold on every machine; a number of seconds would not."""
    result = run_cli(command=(sys.executable, "-X", "importtime", "-m", "ampdoctor", *arguments), env=env)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert result.returncode == 0
    assert "typer" in imported
    assert not {"torch", "numpy", "jinja2", "safetensors", "rich", "asyncio", "multiprocessing", "ssl"} & imported


FREED = """
import resource
from ampdoctor.cli import process
{kept}
for _ in range(8):
    b"x" * (64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library hands out memory")
def test_freed_memory_is_kept():
    def faults(kept):
        command = [sys.executable, "-c", FREED.format(kept=kept)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env).stdout)

    given_back, kept = faults(""), faults("process.keep_freed_memory()")
    assert kept < given_back / 2
