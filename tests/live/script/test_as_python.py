"""`ampdoctor run` beside plain Python: the same bytes on both streams, and the same end."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.live.script import scripts

NO_STEP = re.compile(rb"ampdoctor: warning: no optimizer step was seen in this process: nothing of .* was judged\n")
"""What is said of every script here that ends in order; no other word is ours."""
OTHER = pytest.mark.slow
"""For the seconds that two processes take."""


@pytest.fixture
def pair(tmp_path, child_environment):
    """Return a function that runs a command line by Python, and then by ampdoctor -q; gives both answers."""

    def both(*typed, options=(), **keywords):
        keywords = {"cwd": tmp_path, "env": child_environment, "input": b"given\n", "timeout": 60} | keywords
        commands = (
            [sys.executable, *options, *typed],
            [sys.executable, *options, "-m", "ampdoctor", "run", "-q", *typed],
        )
        return [
            (done.stdout, NO_STEP.sub(b"", done.stderr), done.returncode)
            for done in (subprocess.run(command, capture_output=True, check=False, **keywords) for command in commands)
        ]

    return both


@pytest.fixture
def child_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AMPDOCTOR", "COV"))}


CASES = [
    pytest.param(scripts.WORLD, ["--every", "3", "-m", "--", "-o"], 0, id="world"),
    pytest.param(scripts.CHAINED, [], 1, id="chained"),
    pytest.param(scripts.INTERRUPTED, ["twice"], -2, id="interrupted"),
    pytest.param(scripts.FORKED, ["exit"], 0, id="forked"),
    pytest.param(scripts.OBJECTS, ["-m"], 2, id="objects"),
    *(
        pytest.param(scripts.EXITS, [how], code, id=f"exits {how}", marks=OTHER)
        for how, code in (("3", 3), ("text", 1), ("odd", 1))
    ),
    *(
        pytest.param(scripts.HOOK, [how], code, id=f"hook {how}", marks=OTHER)
        for how, code in (("plain", 1), ("exit", 7))
    ),
    pytest.param(scripts.TERMINATED, ["handled", "SIGTERM"], 143, id="terminated, handled", marks=OTHER),
    pytest.param(scripts.LATE, [], 0, id="late", marks=OTHER),
    pytest.param(scripts.SYNTAX, [], 1, id="syntax", marks=OTHER),
    pytest.param(scripts.PROCESSES, ["fork", "spawn", "forkserver"], 0, id="processes", marks=OTHER),
    pytest.param(scripts.LEFT, [], 5, id="os._exit", marks=OTHER),
]


@pytest.mark.parametrize(("source", "arguments", "code"), CASES)
def test_a_file(pair, tmp_path, source, arguments, code):
    (tmp_path / "train.py").write_text(source)
    plain, watched = pair("train.py", *arguments)
    assert watched == plain
    assert plain[2] == code


@OTHER
@pytest.mark.parametrize("typed", ["./sub/../sub/train.py", "link.py", "ABSOLUTE"])
def test_names_of_a_file(pair, tmp_path, typed):
    script = tmp_path / "sub" / "train.py"
    script.parent.mkdir()
    script.write_text(scripts.WORLD + "\nraise ValueError(1)")
    (tmp_path / "link.py").symlink_to(script)
    plain, watched = pair(str(script) if typed == "ABSOLUTE" else typed)
    assert watched == plain
    assert plain[2] == 1


@OTHER
@pytest.mark.parametrize("options", [["-P"], ["-u", "-O"]])
def test_options_of_the_interpreter(pair, tmp_path, options):
    (tmp_path / "train.py").write_text(scripts.WORLD)
    plain, watched = pair("train.py", options=options)
    assert watched == plain
    assert plain[2] == 0


@OTHER
@pytest.mark.parametrize(("typed", "code"), [("package.train", 1), ("namespace.train", 0)])
def test_a_module(pair, tmp_path, typed, code):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("NAME = __name__")
    (package / "train.py").write_text(scripts.MODULE)
    (tmp_path / "namespace").mkdir()
    (tmp_path / "namespace" / "train.py").write_text(scripts.PROCESSES)
    plain, watched = pair("-m", typed, *([] if typed.startswith("package") else ["spawn"]))
    assert watched == plain
    assert plain[2] == code


@OTHER
def test_a_reader_that_goes(tmp_path, child_environment):
    (tmp_path / "train.py").write_text(scripts.FLOOD)
    answers = []
    for command in ([sys.executable, "train.py"], [sys.executable, "-m", "ampdoctor", "run", "-q", "train.py"]):
        process = subprocess.Popen(
            command, cwd=tmp_path, env=child_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        first = process.stdout.readline()
        process.stdout.close()
        answers.append((first, process.stderr.read(), process.wait(60)))
        process.stderr.close()
    assert answers[0] == answers[1]
    assert b"BrokenPipeError" in answers[0][1]
