"""A log that is begun in a test, and closed after it."""

from __future__ import annotations

import pytest

from ampdoctor.live.log.run_log import RunLog
from tests.live.log.logs import HEADER


@pytest.fixture
def said():
    return []


@pytest.fixture
def begin(tmp_path, said):
    """Returns a function that begins a log; all are closed in the end."""
    begun = []

    def make(header=HEADER, *, folder=tmp_path, **more):
        begun.append(RunLog(folder, header, say=said.append, **more))
        return begun[-1]

    yield make
    for log in begun:
        log.close()
