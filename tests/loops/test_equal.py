"""A replayed script trains on the batches of `python script.py`, in their order and to the same losses."""

from __future__ import annotations

import pytest

from ampdoctor.workflows.opening.open_replay import open_replay
from tests.loops.recorder import recording, run_bare
from tests.loops.trained import SCRIPTS, each, request_of

STEPS = 20
COME_BACK = [script for script in SCRIPTS if not script.draws_its_batches]


def replayed(session, steps):
    """Step a session, and return each backward."""
    with recording() as record:
        for index in steps:
            assert session.has_step(index)
            session.step(index)
    return record.backwards


@pytest.mark.parametrize(("script", "policy"), each(*SCRIPTS, fast=("nanogpt", "gan")))
def test_twenty_replayed_steps_are_the_bare_script_s(script, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    most = STEPS * script.backwards
    bare = run_bare(script.path, (), policy, tmp_path, most)
    with open_replay(request_of(script, (), policy)) as replay:
        session = replay.session()
        again = replayed(session, range(STEPS))
        session.close()
    assert len(bare) == most
    assert again == bare


@pytest.mark.parametrize(("script", "policy"), each(*COME_BACK, fast=("gan",)))
def test_a_step_comes_back_from_a_snapshot(script, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_replay(request_of(script, (), policy)) as replay:
        session = replay.session()
        replayed(session, range(2))
        assert session.has_step(2)
        state = session.snapshot()
        first = replayed(session, [2])
        state.restore()
        assert replayed(session, [2]) == first
        session.close()
