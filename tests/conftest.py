"""What every test gets: one thread, no settings of the caller's terminal, and a check of reports against the schema."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two test workers with two threads each only disturb

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import pytest
import typer.main
from hypothesis import settings

from ampdoctor.reports.json_report import report_as_dict, schema
from ampdoctor.reports.read_json import report_from_dict
from tests.pairwise import leave_the_rest_to_thorough

ROOT = Path(__file__).parent.parent
FORKED = Path(__file__).with_name("forked")
LARGE = 100_000
"""Characters from which a report is held against the schema by the reader alone, in a tenth of the time: it refuses the
same (tests/reports/reading/test_from_json.py)."""
TERMINAL_VARIABLES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # behind nohup, say: the processes of the tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Typer makes the commands of the program anew each time that it is run: a tenth of a second of a thousand tests
typer.main.get_command = functools.cache(typer.main.get_command)

settings.register_profile("ampdoctor", deadline=None)  # a shared machine is slow now and then; that is no defect
settings.load_profile("ampdoctor")


def pytest_collection_modifyitems(items):
    leave_the_rest_to_thorough(items)


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    """No test depends on the terminal that it is started from."""
    for name in filter(_of_the_caller, list(os.environ)):
        monkeypatch.delenv(name)


def _of_the_caller(variable):
    return variable in TERMINAL_VARIABLES or variable.startswith("AMPDOCTOR_")


@pytest.fixture(autouse=True)
def users_modules():
    """No test meets the `train.py` or `net.py` that another one has imported."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and "pytest-of" in file:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def accelerates_own_state():
    """No test meets the one state of its process that Accelerate has set up for another."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def check_report():
    """Return a function that reads JSON text strictly, holds it against the schema, and returns the object.

    The object is also read back as a report and written again: nothing of any report of any test is lost on the way.
    """
    validator = jsonschema.Draft202012Validator(schema(), format_checker=jsonschema.FormatChecker())

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    def check(text):
        report = json.loads(text, parse_constant=refuse)
        if len(text) < LARGE:
            validator.validate(report)
        assert report_as_dict(report_from_dict(report)) == report, "it is not the same when it is read back"
        return report

    return check


@pytest.fixture(scope="session")
def python():
    """The path of a Python that has torch and ampdoctor imported already: its processes are forks of a server.

    What a process does before torch is there, and that it does without, is for `sys.executable` to show.
    """
    if not sys.platform.startswith("linux"):
        yield sys.executable
        return
    with TemporaryDirectory() as folder:
        socket, program = Path(folder, "socket"), Path(folder, "python")
        command = [sys.executable, str(FORKED / "server.py"), str(socket)]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean) as server:
            assert server.stdout.readline() == b"ready\n"
            program.write_text(
                f'#!/bin/sh\nexec "{sys.executable}" -IS "{FORKED}/client.py" "{socket}" "{program}" "$@"\n'
            )
            program.chmod(0o755)
            yield str(program)


@pytest.fixture(scope="session")
def run_cli(request):
    """Return a function that runs `python -m ampdoctor`, in a fork, or another command, and waits for it."""

    def run(*arguments, command=None, env=(), **keywords):
        if command is None:
            command = (request.getfixturevalue("python"), "-m", "ampdoctor")
        clean = {key: value for key, value in os.environ.items() if not _of_the_caller(key)}
        path = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH", "")]))
        options = {"capture_output": True, "text": True, "timeout": 120, "stdin": subprocess.DEVNULL, **keywords}
        return subprocess.run(
            [*command, *arguments], check=False, env={**clean, "PYTHONPATH": path, **dict(env)}, **options
        )

    return run
