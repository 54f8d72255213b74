"""A script that is replayed as it is trains on what it trains on when it is run: batch by batch, loss by loss."""

from __future__ import annotations

import contextlib

import pytest

from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from tests.loops.recorder import LOOPS, recording, run_bare

STEPS = 20
SCRIPTS = {
    "nanogpt.py": ({"optimizer"}, 2),
    "gan.py": ({"optimizerD", "optimizerG"}, 3),
    "vision_ema.py": ({"optimizer"}, 1),
    "ppo.py": ({"optimizer"}, 16),
    "diffusion.py": ({"optimizer"}, 2),
}
"""Its optimizers by their own names, and the backwards in one step: micro-steps, networks, epochs of a rollout."""
FAST = ("gan.py",)


def replayed(script, arguments, policy, folder, steps):
    """What the first steps of a replay train on, and the session's optimizers by name."""
    request = ReplayRequest(factory=str(script), script_arguments=tuple(arguments), policy=policy)
    with contextlib.chdir(folder), open_replay(request) as replay:
        session = replay.session()
        try:
            with recording() as record:
                for step in range(steps):
                    assert session.has_step(step)
                    session.step(step)
            return record, set(session.optimizers)
        finally:
            session.close()


@pytest.mark.each_value_once
@pytest.mark.parametrize("policy", ["cuda", pytest.param("native", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SCRIPTS]
)
def test_the_replayed_steps_are_the_scripts_own(script, policy, tmp_path):
    optimizers, backwards = SCRIPTS[script]
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    record, names = replayed(LOOPS / script, (), policy, there, STEPS)
    assert names == optimizers
    assert len(record) == STEPS * backwards
    assert all(entered for _, entered in record), "no model ran before a backward"
    assert record == run_bare(LOOPS / script, (), policy, here, most=len(record))
