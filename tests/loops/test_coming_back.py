"""A step of a script comes back from a snapshot: counters, prefetched batches, environments, averages, iterators."""

from __future__ import annotations

import pytest

from ampdoctor.workflows.open_replay import open_replay
from tests.loops.recorder import recording
from tests.loops.trained import SCRIPTS, each, request_of


def stepped(session, index):
    """Take a step, and return each backward of it."""
    with recording() as record:
        session.step(index)
    return record.backwards


@pytest.mark.each_value_once
@pytest.mark.parametrize(("script", "policy"), each(*SCRIPTS, fast=("gan",)))
def test_a_step_comes_back_from_a_snapshot(script, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_replay(request_of(script, (), policy)) as replay:
        session = replay.session()
        for index in range(2):
            assert session.has_step(index)
            session.step(index)
        assert session.has_step(2)
        state = session.snapshot()
        first = stepped(session, 2)
        state.restore()
        assert first
        assert stepped(session, 2) == first
        session.close()
