"""The command line without a process of its own: torch is imported once for all of these tests."""

from __future__ import annotations

import subprocess

import pytest

from ampdoctor.cli.main import main


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Return a function that runs a command line in this process; what a process adds to it is asked in tests/cli."""

    def run(*arguments, env=(), cwd=None):
        with monkeypatch.context() as changed:
            for name, value in dict(env).items():
                changed.setenv(name, value)
            if cwd is not None:
                changed.chdir(cwd)
            capsys.readouterr()
            code = main(arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run
