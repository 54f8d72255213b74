from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session")
def real():
    """Return a function that imports a framework's module, (make scalers installs them) or skips the test."""

    def load(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each says at its import which accelerators it lacks
            return pytest.importorskip(name)

    return load
