"""The losses of two networks that train against each other are two series, and never their sum."""

from __future__ import annotations

import csv
import json
import math
import random

import pytest

from ampdoctor.health.reading.log_kind import OF_A_NETWORK
from ampdoctor.health.reading.other_logs import _fields
from ampdoctor.workflows.health import health

NAMES = [
    ("G_loss", "D_loss"),
    ("loss_G", "loss_D"),
    ("g_loss", "d_loss"),
    ("train/g_loss", "train/d_loss"),
    ("gen_loss", "disc_loss"),
    ("lossG", "lossD"),
]


def rows(first, second, lost=math.inf):
    draw = random.Random(3)
    for step in range(200):
        loss = math.nan if step >= lost else draw.uniform(0.6, 0.7)
        yield {"step": step, first: loss, second: draw.uniform(1.2, 1.4)}


def written(path, lines):
    lines = list(lines)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return path


@pytest.mark.parametrize("names", NAMES)
def test_two_losses(tmp_path, names):
    report = health([written(tmp_path / "gan.csv", rows(*names))])
    assert (report.verdict, [run.optimizer for run in report.health.runs]) == ("healthy", [*names])
    for run, least in zip(report.health.runs, (0.6, 1.2), strict=True):
        (curve,) = [curve for curve in run.curves if curve.name == "loss"]
        assert all(least <= value <= least + 0.2 for value in curve.middle)


def test_one_of_the_two_that_is_lost(tmp_path):
    report = health([written(tmp_path / "gan.jsonl", rows("loss_D", "loss_G", lost=150))])
    assert report.verdict == "sick"
    assert {finding.evidence.get("optimizer") for finding in report.findings} == {"loss_D"}


@pytest.mark.parametrize(
    ("row", "loss"),
    [
        ({"train/box_loss": 1.0, "train/cls_loss": 2.0}, 3.0),
        ({"loss": 5.0, "g_loss": 1.0, "d_loss": 2.0}, 5.0),
        ({"train/d_loss": 2.0}, 2.0),
    ],
)
def test_parts_of_one_loss_stay_one(row, loss):
    fields = _fields(row)
    assert fields["loss"] == loss
    assert not any(name.startswith(OF_A_NETWORK) for name in fields)
