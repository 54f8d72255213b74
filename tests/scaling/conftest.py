from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session")
def real():
    """Return a function that imports a framework's module, which `make scalers` installs; without it the test is skipped."""

    def load(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each says at its import which accelerators it lacks
            return pytest.importorskip(name)

    return load
