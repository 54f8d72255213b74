"""`ampdoctor run` beside plain Python: the same bytes on both streams, and the same end."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import zipfile

import pytest

from tests.live.script import scripts
from tests.pairwise import THOROUGH

OTHER = pytest.mark.slow
"""For the seconds that two processes take."""


@pytest.fixture
def pair(tmp_path, child_environment):
    """Return a function that runs a command line by Python, and then by ampdoctor; gives both answers."""

    def both(*typed, options=(), **keywords):
        keywords = {"cwd": tmp_path, "env": child_environment, "input": b"given\n", "timeout": 60} | keywords
        commands = ([sys.executable, *options, *typed], [sys.executable, *options, "-m", "ampdoctor", "run", *typed])
        return [
            (done.stdout, done.stderr, done.returncode)
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
    pytest.param(scripts.GROUP, [], 1, id="group", marks=OTHER),
    *(
        pytest.param(scripts.EXITS, [how], code, id=f"exits {how}", marks=OTHER)
        for how, code in (("3", 3), ("text", 1), ("none", 0), ("true", 1), ("256", 0), ("-1", 255), ("odd", 1))
    ),
    *(
        pytest.param(scripts.HOOK, [how], code, id=f"hook {how}", marks=OTHER)
        for how, code in (("plain", 1), ("exit", 7))
    ),
    pytest.param(scripts.INTERRUPTED, ["once"], -2, id="interrupted once", marks=OTHER),
    pytest.param(scripts.TERMINATED, ["plain", "SIGTERM"], -15, id="terminated", marks=OTHER),
    pytest.param(scripts.TERMINATED, ["plain", "SIGKILL"], -9, id="killed", marks=OTHER),
    pytest.param(scripts.TERMINATED, ["handled", "SIGTERM"], 143, id="terminated, handled", marks=OTHER),
    pytest.param(scripts.LATE, [], 0, id="late", marks=OTHER),
    pytest.param(scripts.LATIN, [], 1, id="latin", marks=OTHER),
    pytest.param(scripts.SYNTAX, [], 1, id="syntax", marks=OTHER),
    pytest.param(scripts.INDENT, [], 1, id="indent", marks=OTHER),
    pytest.param(scripts.ANNOTATED, [], 0, id="annotations", marks=OTHER),
    pytest.param(scripts.IMPORTS, [], 1, id="imports", marks=OTHER),
    pytest.param(scripts.PROCESSES, ["fork", "spawn", "forkserver"], 0, id="processes", marks=OTHER),
    pytest.param(scripts.FORKED, ["fall"], 0, id="forked, falls through", marks=OTHER),
    pytest.param(scripts.FORKED, ["raise"], 0, id="forked, raises", marks=OTHER),
    pytest.param(scripts.LEFT, [], 5, id="os._exit", marks=OTHER),
]


@pytest.mark.parametrize(("source", "arguments", "code"), CASES)
def test_a_file(pair, tmp_path, source, arguments, code):
    (tmp_path / "train.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    (tmp_path / "broken_neighbour.py").write_text(scripts.NEIGHBOUR)
    plain, watched = pair("train.py", *arguments)
    assert watched == plain
    assert plain[2] == code


@OTHER
@pytest.mark.parametrize("typed", ["./sub/../sub/train.py", "link.py", "sub/compiled.pyc", "ABSOLUTE"])
def test_names_of_a_file(pair, tmp_path, typed):
    script = tmp_path / "sub" / "train.py"
    script.parent.mkdir()
    script.write_text(scripts.WORLD + "\nraise ValueError(1)")
    py_compile.compile(str(script), str(tmp_path / "sub" / "compiled.pyc"))
    (tmp_path / "link.py").symlink_to(script)
    plain, watched = pair(str(script) if typed == "ABSOLUTE" else typed)
    assert watched == plain
    assert plain[2] == 1


@OTHER
@pytest.mark.parametrize("options", [["-P"], ["-u", "-O"], ["-W", "error"], ["-X", "dev"]])
def test_options_of_the_interpreter(pair, tmp_path, options):
    (tmp_path / "train.py").write_text(scripts.WORLD)
    plain, watched = pair("train.py", options=options)
    assert watched == plain
    assert plain[2] == 0


@OTHER
@pytest.mark.parametrize(("typed", "code"), [("package.train", 1), ("package", 1), ("namespace.train", 0)])
def test_a_module(pair, tmp_path, typed, code):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("NAME = __name__")
    (package / "train.py").write_text(scripts.MODULE)
    (package / "__main__.py").write_text(scripts.MODULE)
    (tmp_path / "namespace").mkdir()
    (tmp_path / "namespace" / "train.py").write_text(scripts.PROCESSES)
    plain, watched = pair("-m", typed, *([] if typed.startswith("package") else ["spawn"]))
    assert watched == plain
    assert plain[2] == code


@OTHER
@pytest.mark.each_value_once
@pytest.mark.parametrize("options", [[], ["-P"]])
@pytest.mark.parametrize("typed", ["folder", "./folder/", "archive.zip"])
def test_a_folder_and_an_archive(pair, tmp_path, typed, options):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(scripts.ARCHIVED)
    (tmp_path / "folder" / "inside.py").write_text("print(__name__)")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for name in ("__main__.py", "inside.py"):
            archive.write(tmp_path / "folder" / name, name)
    pair(typed, options=options)  # what it compiles is there for both afterwards
    plain, watched = pair(typed, "-x", options=options)
    assert watched == plain
    assert plain[2] == 1


@OTHER
def test_a_reader_that_goes(tmp_path, child_environment):
    (tmp_path / "train.py").write_text(scripts.FLOOD)
    answers = []
    for command in ([sys.executable, "train.py"], [sys.executable, "-m", "ampdoctor", "run", "train.py"]):
        process = subprocess.Popen(
            command, cwd=tmp_path, env=child_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        first = process.stdout.readline()
        process.stdout.close()
        answers.append((first, process.stderr.read(), process.wait(60)))
        process.stderr.close()
    assert answers[0] == answers[1]
    assert b"BrokenPipeError" in answers[0][1]


@pytest.mark.parametrize(
    ("how", "code", "lines"),
    [
        pytest.param("plain", 0, 40, marks=OTHER),
        pytest.param("raises", 1, 31, marks=OTHER),
        pytest.param("exits", 3, 31, marks=THOROUGH),  # CASES has each of these ends with less left alive
        pytest.param("interrupted", -2, 31, marks=THOROUGH),
        pytest.param("sick", 0, 40, marks=THOROUGH),
        pytest.param("sick, looked at", 1, 40, marks=OTHER),
        pytest.param("sick and raises, looked at", 1, 20, marks=OTHER),
    ],
)
def test_what_the_script_leaves_alive_ends_when_and_as_it_would(tmp_path, child_environment, how, code, lines):
    (tmp_path / "train.py").write_text(scripts.LIFE)
    said, looks = [], how.endswith(", looked at")
    options = [] if looks else ["--look", "off"]
    for command in ["train.py"], ["-m", "ampdoctor", "run", *options, "train.py"]:
        done = subprocess.run(
            [sys.executable, *command, how.removesuffix(", looked at")],
            capture_output=True,
            check=False,
            cwd=tmp_path,
            env=child_environment,
            timeout=100,
            text=True,
        )
        assert (tmp_path / "lines.csv").read_text().split() == [str(step) for step in range(lines)]
        said.append(done.stdout.splitlines())
    assert done.returncode == code
    if looks:  # a look reads objects, and what is in them is freed in another order
        said = [[line for line in one if not line.startswith("del in")] + sorted(one) for one in said]
    assert said[1] == said[0]
