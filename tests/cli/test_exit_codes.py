"""The exit codes: of every command in process, and of each outcome as a process of the installed program."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.drive import behave

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "cli" / "drive.py"
COMMANDS = {
    "scan": ["model.pt"],
    "bisect-nan": ["run.py:make_run"],
    "profile": ["run.py:make_run"],
    "recommend": ["run.py:make_run"],
}
"""With a workflow that behaves as told."""
BEHAVIOURS = {
    "healthy": "healthy",
    "findings": "sick",
    "unreadable": "refuse",
    "factory raises": "user",
    "crash": "crash",
}
CODES = {
    "healthy": 0,
    "findings": 1,
    "usage error": 2,
    "unreadable": 2,
    "factory raises": 2,
    "crash": 2,
    "broken pipe": 2,
    "Ctrl-C": 130,
}


@pytest.mark.parametrize("form", ["human", "json"])
@pytest.mark.parametrize("outcome", BEHAVIOURS)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_exit_code_says_the_same_of_every_command(command, outcome, form, typed, stub_workflow):
    stub_workflow(command.replace("-", "_"), functools.partial(behave, BEHAVIOURS[outcome]))
    result = typed(command, *COMMANDS[command], "--format", form)
    assert result.returncode == CODES[outcome]
    assert bool(result.stderr) == (result.returncode == 2)
    reported = form == "json" and outcome in ("unreadable", "factory raises")  # what failed is a report, too
    assert bool(result.stdout) == (result.returncode in (0, 1) or reported)


RUN = """
def raises():
    raise ValueError("no data")

def waits():
    import sys, time
    sys.stderr.write("ready\\n")
    sys.stderr.flush()
    time.sleep(60)
"""
CHECKPOINT = str(ROOT / "fixtures" / "checkpoints" / "torch_zip" / "step4.pt")
INSTALLED = str(Path(sys.executable).with_name("ampdoctor"))
REAL = [
    ("healthy", ["scan", CHECKPOINT]),
    ("findings", ["scan", "sick.pt"]),
    ("usage error", ["rule", "AMP999"]),
    ("unreadable", ["scan", "cut.pt"]),
    ("factory raises", ["bisect-nan", "run.py:raises"]),
    ("crash", ["scan", "sick.pt"]),
    ("broken pipe", ["scan", "sick.pt"]),
    ("Ctrl-C", ["bisect-nan", "run.py:waits"]),
]
"""Of the installed program; its crash is that of `drive.py`."""


@pytest.fixture(scope="module")
def sick(python, tmp_path_factory):
    """A sick checkpoint."""
    path = tmp_path_factory.mktemp("sick") / "sick.pt"
    subprocess.run([python, str(ROOT / "fixtures" / "demo" / "sick_checkpoint.py"), str(path)], check=True)
    return path.read_bytes()


@pytest.fixture
def real_folder(tmp_path, sick):
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "sick.pt").write_bytes(sick)
    (tmp_path / "cut.pt").write_bytes(sick[:5000])
    return tmp_path


def named(part):
    return part if isinstance(part, str) else " ".join(part[:2])


def command_ended(command, outcome, folder, run_cli):
    """The exit code of a command that is to end so."""
    if outcome == "broken pipe":
        reading, writing = os.pipe()
        os.close(reading)
        try:
            return run_cli(command=command, cwd=folder, capture_output=False, stdout=writing).returncode
        finally:
            os.close(writing)
    if outcome == "Ctrl-C":
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
        return process.returncode
    result = run_cli(command=command, cwd=folder)
    assert bool(result.stdout) == (result.returncode in (0, 1)), result.stderr
    assert ("internal error" in result.stderr) == (outcome == "crash")
    return result.returncode


@pytest.mark.slow
@pytest.mark.parametrize(("outcome", "given"), REAL, ids=named)
def test_the_exit_code_of_the_installed_program(outcome, given, real_folder, run_cli):
    program = (sys.executable, str(DRIVER), "crash") if outcome == "crash" else (INSTALLED,)
    assert command_ended((*program, *given), outcome, real_folder, run_cli) == CODES[outcome]
