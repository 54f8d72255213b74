"""The benchmark of live watching measures what it says: in small, without a word about how fast this machine is."""

from __future__ import annotations

import torch

from benchmarks import live
from benchmarks.peers.monitoring import TrainerMonitor


def test_every_contestant_takes_part_or_says_why_not(capsys):
    times = live.measure("resnet", repeats=2, burst=1, small=True)
    said = capsys.readouterr().out
    absent = {name for name, entry in live.CONTESTANTS.items() if entry.missing() is not None}
    assert times.keys() | absent == {live.BARE, live.CLIPS, *live.CONTESTANTS}
    assert all(len(taken) == 2 and min(taken) >= 0 for taken in times.values())
    assert all(f"| {name} | | | not run: " in said for name in absent)
    assert live.NUMBERS not in absent
    assert "target: at most 1.01 x: " in said


def test_a_contestant_leaves_the_loop_as_it_was_and_no_weight_changed():
    bare, watched = live.transformer(small=True), live.transformer(small=True)
    for name, contestant in live.CONTESTANTS.items():
        if contestant.missing() is None:
            live.take(watched, name, 1)
            bare.max_norm = watched.max_norm
            if isinstance(contestant.attach, TrainerMonitor):
                continue  # it has a copy
            for _ in range(live.UNTIMED + 1):
                bare.step()
            assert watched.monitors == []
    assert not torch.is_anomaly_enabled()
    pairs = zip(bare.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_cost_counts_one_step_with_details_in_a_hundred():
    times = {live.BARE: [1.0], live.NUMBERS: [1.004], live.DETAILS: [1.104]}
    assert live.summary(times).startswith("met (1.0050")
    times[live.DETAILS] = [2.004]
    assert live.summary(times).startswith("MISSED (1.0140")
