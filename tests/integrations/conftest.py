from __future__ import annotations

import sys
from pathlib import Path

import pytest


class _Keeper:
    """Remembers what a run of pytest in this process has imported, before pytester makes the process forget it."""

    def __init__(self):
        self.modules = {}

    def pytest_unconfigure(self):
        self.modules = dict(sys.modules)


@pytest.fixture
def run_here(pytester):
    """Return a function that runs pytest in this process and keeps the libraries that were imported meanwhile.

    pytester forgets them; parts of torch cannot be imported twice ("duplicate template name").
    """

    def run(*arguments):
        keeper = _Keeper()
        result = pytester.runpytest_inprocess(*arguments, plugins=[keeper])
        for name, module in keeper.modules.items():
            file = getattr(module, "__file__", None)
            if file is None or not Path(file).is_relative_to(pytester.path):
                sys.modules.setdefault(name, module)
        return result

    return run
