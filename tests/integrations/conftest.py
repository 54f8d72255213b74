from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integrations.plugin_runs import ARGUMENTS

ROOT = Path(__file__).parents[2]


class _Keeper:
    """Remembers the libraries that runs of pytest in this process have imported.

    pytester makes the process forget them, after each run and at its own end; parts of torch cannot be imported twice
    ("duplicate template name").
    """

    def __init__(self, folder):
        self._folder = folder
        self._modules = {}

    def pytest_unconfigure(self):
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is None or not Path(file).is_relative_to(self._folder):
                self._modules[name] = module

    def restore(self):
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)


@pytest.fixture(autouse=True)
def _kept(tmp_path_factory):
    """A keeper that is made before pytester, and therefore restores after it."""
    keeper = _Keeper(tmp_path_factory.getbasetemp())
    yield keeper
    keeper.restore()


@pytest.fixture
def run_here(_kept, pytester):
    """Return a function that runs pytest in this process and keeps the libraries that were imported meanwhile."""

    def run(*arguments):
        result = pytester.runpytest_inprocess(*arguments, plugins=[_kept])
        _kept.restore()
        return result

    return run


@pytest.fixture
def run(pytester, monkeypatch, run_here):
    """Return a function that runs pytest in this process on one file of tests."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(text, *arguments):
        pytester.makepyfile(test_it=text)
        return run_here(*ARGUMENTS, *arguments)

    return run


@pytest.fixture
def run_apart(pytester, monkeypatch):
    """Return a function that does so in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "160")

    def run(text, *arguments):
        pytester.makepyfile(test_it=text)
        return pytester.runpytest_subprocess(*ARGUMENTS, *arguments)

    return run
