from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import ampdoctor.workflows
from ampdoctor.cli.main import main
from tests.cli.drive import behave

DRIVER = Path(__file__).with_name("drive.py")


@pytest.fixture
def drive(python, run_cli):
    """Return a function that runs tests/cli/drive.py with a behaviour and ampdoctor's arguments."""
    return lambda *arguments, **keywords: run_cli(*arguments, command=(python, str(DRIVER)), **keywords)


@pytest.fixture
def behaving(stub_workflow):
    """Return a function that makes every scan of this process behave as tests/cli/drive.py has it."""
    return lambda behaviour: stub_workflow("scan", functools.partial(behave, behaviour))


@pytest.fixture
def typed(monkeypatch, capsys):
    """Return a function that runs the command line in this process: its exit code, and what went to both streams."""

    def run(*arguments, env=()):
        capsys.readouterr()
        with monkeypatch.context() as within:
            for name, value in dict(env).items():
                within.setenv(name, value)
            code = main(list(arguments))
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run


@pytest.fixture
def stub_workflow(monkeypatch):
    """Return a function that puts a function of ours in the place of a workflow."""

    def stub(name, function):
        module = ModuleType(f"ampdoctor.workflows.{name}")
        setattr(module, name, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(ampdoctor.workflows, name, module, raising=False)

    return stub
