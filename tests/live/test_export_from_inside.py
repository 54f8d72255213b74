"""`ampdoctor.watch(export=...)`: a training's numbers and alerts go elsewhere while it runs, and it is left alone."""

from __future__ import annotations

import csv
import math
import random

import numpy as np
import pytest
import torch

import ampdoctor
from ampdoctor.errors import UsageError
from ampdoctor.workflows.watcher import standing
from tests.health.sinks.test_sinks import Kept
from tests.live.test_watch_from_inside import Loop, same


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_and_the_diagnosis_arrive_and_no_bit_of_the_training_changes(tmp_path):
    alone = Loop()
    alone()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - a training's own state
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the same
    loop, kept = Loop(), Kept()
    with ampdoctor.watch(folder=tmp_path / "log", export=[f"csv={tmp_path / 'out'}", kept], every=4):
        loop()
    assert same(loop.state, alone.state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002 - the same
    told = rows_of(tmp_path / "out" / "steps.csv")
    assert [int(row["step"]) for row in told] == list(range(8))
    assert [math.isfinite(float(row["loss"])) for row in told] == [step < 5 for step in range(8)]
    assert [row["code"] for row in rows_of(tmp_path / "out" / "alerts.csv")] == ["AMP202"]
    assert {row["metric"] for row in rows_of(tmp_path / "out" / "others.csv")} >= {"update_ratio"}
    told = [one for one in kept.told if isinstance(one, tuple)]
    assert [step for step, values in told if isinstance(values, dict) and "loss" in values] == list(range(8))
    assert (5, "AMP202") in told
    assert kept.told[-1] == "close"


@pytest.mark.parametrize(
    ("export", "sentence"),
    [
        (["grafana=x"], "no such sink"),
        ("csv", "say where to"),
        ([3], "a int is neither text like tensorboard=DIR"),
        ([object()], "nor has it log, alert, flush and close"),
    ],
)
def test_what_is_no_sink_is_refused_at_once(export, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence), ampdoctor.watch(folder=tmp_path, export=export):
        raise AssertionError
    assert standing() is None


def test_a_sink_of_the_users_that_raises_is_said_once_and_harms_nothing(tmp_path, caplog):
    class Bad(Kept):
        def log(self, *_, **__):
            raise RuntimeError("no such project")

    alone = Loop(sick=())
    alone()
    loop = Loop(sick=())
    with ampdoctor.watch(folder=tmp_path, export=[Bad()]):
        loop()
    assert same(loop.state, alone.state)
    assert [record.getMessage() for record in caplog.records] == [
        "the export Bad ends here: RuntimeError: no such project; the training goes on without it"
    ]


def test_other_ranks_than_the_first_export_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    kept = Kept()
    with ampdoctor.watch(folder=tmp_path, export=[kept]):
        Loop(sick=())()
    assert kept.told == []
    assert torch.is_grad_enabled()
