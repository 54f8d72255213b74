"""The table of exit codes: every command with every outcome, in two formats by turns, each in a process of its own.

Those of the table are forks; each outcome has one process of the installed program besides.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from ampdoctor.cli.options import ListFormat
from ampdoctor.reports.formats import FORMATS
from ampdoctor.reports.json_report import render_json
from tests.conftest import TERMINAL_VARIABLES
from tests.samples import EVERY

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "cli" / "drive.py"
AT_ONCE = 4
FACTORY = "run.py:make_run"
ARGUMENTS = {
    "scan": ["model.pt"],
    "bisect-nan": [FACTORY],
    "profile": [FACTORY],
    "recommend": [FACTORY],
    "merge": ["healthy.json"],
    "rule": ["AMP201"],
    "env": [],
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
BEHAVIOURS = {
    "healthy": "healthy",
    "findings": "sick",
    "usage error": "healthy",
    "unreadable": "refuse",
    "factory raises": "user",
    "crash": "crash",
    "broken pipe": "sick",
    "Ctrl-C": "wait",
}
IMPOSSIBLE = {
    ("scan", "factory raises"): "a scan knows no factory: it runs no code at all",
    ("merge", "factory raises"): "it reads reports, and runs nothing",
    ("rule", "factory raises"): "it explains, and runs nothing",
    ("env", "factory raises"): "it lists versions, and runs nothing",
    ("rule", "findings"): "it examines nothing",
    ("env", "findings"): "it examines nothing",
    ("rule", "unreadable"): "its pages are part of the program",
    ("env", "unreadable"): "what cannot be found out is `none` on its list",
}
"""What cannot happen, and why."""


def two_forms(command, outcome):
    """Human, and another in turn: each command and each outcome meets all of them."""
    others = get_args(ListFormat)[1:] if command in {"rule", "env"} else [form for form in FORMATS if form != "human"]
    turn = list(ARGUMENTS).index(command) + list(CODES).index(outcome)
    return "human", others[turn % len(others)]


def arguments(command, outcome, form):
    given = ARGUMENTS[command]
    if command == "merge" and outcome in {"findings", "broken pipe"}:
        given = ["sick.json"]
    if command == "merge" and outcome == "unreadable":
        given = ["broken.json"]
    wrong = ["--no-such-option"] if outcome == "usage error" else []
    return [BEHAVIOURS[outcome], command, *given, "--format", form, *wrong]


def start(python, given, folder, stdout=subprocess.PIPE):
    clean = {key: value for key, value in os.environ.items() if key not in TERMINAL_VARIABLES}
    return subprocess.Popen(
        [python, str(DRIVER), *given],
        stdout=stdout,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT)},
    )


def ended(python, command, outcome, form, folder):
    """The exit code, and what went to both streams."""
    given = arguments(command, outcome, form)
    if outcome == "broken pipe":
        reading, writing = os.pipe()
        os.close(reading)
        with start(python, given, folder, stdout=writing) as process:
            os.close(writing)
            _, err = process.communicate(timeout=120)
        return process.returncode, "", err
    with start(python, given, folder) as process:
        if outcome == "Ctrl-C":
            assert process.stderr.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def folder(tmp_path):
    for name in ("healthy", "sick"):
        (tmp_path / f"{name}.json").write_text(render_json(EVERY[name]))
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


CELLS = [(command, outcome) for command in ARGUMENTS for outcome in CODES if (command, outcome) not in IMPOSSIBLE]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "outcome"), CELLS, ids=lambda part: part.replace(" ", "-"))
def test_the_exit_code_says_the_same_in_every_format(command, outcome, folder, python):
    def run(form):
        return ended(python, command, outcome, form, folder)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = two_forms(command, outcome)
        results = dict(zip(asked, pool.map(run, asked), strict=True))
    assert {form: code for form, (code, _, _) in results.items()} == dict.fromkeys(results, CODES[outcome])
    for form, (code, out, err) in results.items():
        assert (form, "Traceback" in err) == (form, outcome == "factory raises")  # the user's own, trimmed
        if code in (0, 1):
            assert (form, err) == (form, "")
            assert out or form == "github"  # annotations of nothing are nothing
        else:
            reported = outcome in ("unreadable", "factory raises") and command != "merge" and form != "human"
            assert (form, bool(out)) == (form, reported)  # in a form for programs what failed is a report, too
            assert (form, bool(err)) == (form, outcome != "broken pipe")


def test_no_command_is_forgotten():
    from typer.main import get_command

    from ampdoctor.cli.main import app

    # the script's own code, that of a real log, and arithmetic: commands/test_run.py, test_health.py, test_plan.py
    apart = {"run", "health", "plan"}
    assert set(get_command(app).commands) == {*ARGUMENTS, *apart}
    assert set(IMPOSSIBLE) <= {(command, outcome) for command in ARGUMENTS for outcome in CODES}
    assert set(BEHAVIOURS) == set(CODES)


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


def test_every_outcome_has_a_process_of_its_own():
    assert [outcome for outcome, _ in REAL] == list(CODES)
