"""How the process ends: Ctrl-C is 130 whenever it comes, and no code under examination chooses the exit code."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "fixtures" / "checkpoints" / "hf_safetensors"
STARTED = (
    "import sys; from ampdoctor.cli.main import main; print('ready', file=sys.stderr, flush=True); sys.exit(main())"
)

FACTORY = """
import atexit, os, signal, sys, time
import torch
from tests.workflows import interruptible
{before}
def make_run():
    {act}
    return interruptible.make_run(loss=interruptible.loss)
"""
PRESS = "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
SWALLOW = "exec('try:\\n    {}\\nexcept BaseException: pass')"


def examine(run_cli, tmp_path, act="pass", before="", *, options=(), command=None):
    file = tmp_path / "run.py"
    file.write_text(FACTORY.format(act=act, before=before))
    return run_cli("bisect-nan", f"{file}:make_run", "--steps", "1", "--no-progress", *options, command=command)


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ctrl_c_is_130_at_any_moment(early):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STARTED, "scan", str(CHECKPOINT)]
    ended = []
    for moment in range(0, 6, 2 if early else 1):
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr.readline() == "ready\n"
            time.sleep(0.08 * moment + (0.05 if early else 0.53))  # seconds: torch is being imported
            over = process.poll() is not None
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        ended.append((over, process.returncode, err))
    assert [one for one in ended if not one[0] and (one[1] != 130 or "ampdoctor: interrupted" not in one[2])] == []
    assert not all(over for over, *_ in ended)


PRESSED_AT_IMPORT = """
import os, runpy, signal, sys
class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            del sys.argv[1]
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presses())
{}
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    ("started", "module"),
    [("runpy.run_module('ampdoctor', run_name='__main__')", "ampdoctor.cli.main"), ("script", "typer")],
)
def test_ctrl_c_while_the_command_line_is_imported_is_130(module, started):
    if started == "script":
        entry, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
            "ampdoctor"
        ].partition(":")
        started = f"from {entry} import {name} as main\nsys.exit(main())"
    command = [sys.executable, "-c", PRESSED_AT_IMPORT.format(started), module, "scan", str(CHECKPOINT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ampdoctor: interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize(
    ("act", "before"),
    [
        pytest.param(SWALLOW.format(PRESS) + "; raise AttributeError('half a module')", "", id="and-raised"),
        pytest.param("exec('" + PRESS + "')", "", id="inside-an-exec"),
        pytest.param(PRESS, "atexit.register(os.kill, os.getpid(), signal.SIGINT)", id="and-pressed-again"),
    ],
)
def test_ctrl_c_that_the_code_swallowed_is_130(act, before, run_cli, tmp_path):
    whole = (sys.executable, "-m", "ampdoctor") if act.startswith("exec('os") else None  # Python dies of it at its end
    done = examine(run_cli, tmp_path, act, before, command=whole)
    assert done.returncode == 130, done.stderr
    assert done.stderr.count("ampdoctor: interrupted") == 1
    assert "internal error" not in done.stderr


def test_code_that_ends_the_process_is_exit_code_2(run_cli, tmp_path):
    done = examine(run_cli, tmp_path, "os._exit(0)")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the code under examination ended the process with os._exit(0)" in done.stderr


def test_an_exit_handler_does_not_choose_the_exit_code(run_cli, tmp_path):
    done = examine(run_cli, tmp_path, "raise ValueError('mine')", "atexit.register(os._exit, 0)")
    assert done.returncode == 2, done.stderr


@pytest.mark.skipif(os.name == "nt", reason="fork")
def test_a_forked_worker_keeps_its_own_exit_code(run_cli, tmp_path):
    act = "print('worker', os.waitstatus_to_exitcode(os.waitpid(os.fork() or os._exit(7), 0)[1]))"
    assert "worker 7" in examine(run_cli, tmp_path, act).stderr


@pytest.mark.skipif(os.name == "nt", reason="fork")
def test_a_forked_child_that_comes_back_reports_nothing(run_cli, tmp_path, check_report):
    act = """child = os.fork()
    if child:
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    saved = tmp_path / "saved.json"
    options = ("--format", "json", "--report", f"json={saved}")
    done = examine(run_cli, tmp_path, act, "atexit.register(print, 'handled')", options=options)
    assert done.returncode == 0, done.stderr
    assert check_report(done.stdout) == check_report(saved.read_text())
    assert "forked, and the child did not end: it is ended here, and reports nothing" in done.stderr
    assert "child 2" in done.stderr
    assert done.stderr.count("handled") == 1
