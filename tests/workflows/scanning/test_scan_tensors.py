"""The tensors of a scanned checkpoint in its report: what people sort and search."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.scan import scan
from ampdoctor.workflows.scan_against import compare


def state(step=7):
    weight = torch.tensor([[1.0, -4.0, 0.0], [2.0**-30, float("nan"), float("inf")]])
    return {
        "model": {
            "fc.weight": weight,
            "norm.running_mean": torch.zeros(3),
            "half.weight": torch.full((2,), 65504.0, dtype=torch.float16),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}},
            "param_groups": [{"params": [0, 1], "lr": 0.1}],
        },
        "step": step,
    }


@pytest.fixture
def saved(tmp_path):
    torch.save(state(), tmp_path / "run.pt")
    return tmp_path / "run.pt"


def rows_of(report, check_report):
    return check_report(render_json(report))["tensors"]


def test_each_examined_tensor_is_a_row_of_numbers(saved, check_report):
    rows = rows_of(scan(saved), check_report)
    weight = next(row for row in rows if row["name"] == "fc.weight" and row["role"] == "weight")
    assert weight == {
        "name": "fc.weight",
        "role": "weight",
        "entry": "weight",
        "module": "fc",
        "group": "",
        "file": "run.pt",
        "dtype": "float32",
        "shape": [2, 3],
        "examined": 6,
        "counted": 6,
        "zeros": 1,
        "nan": 1,
        "inf": 1,
        "at_max": 0,
        "amax": 4.0,
        "amin": 2.0**-30,
        "fp16": {"flushed": pytest.approx(1 / 3), "subnormal": 0.0, "overflowed": 0.0},
        "bf16": None,
    }
    half = next(row for row in rows if row["name"] == "half.weight")
    assert (half["dtype"], half["at_max"]) == ("float16", 2)
    blank = next(row for row in rows if row["name"] == "norm.running_mean")
    assert (blank["role"], blank["amax"], blank["amin"], blank["zeros"]) == ("buffer", None, None, 3)
    moments = [(row["name"], row["entry"]) for row in rows if row["role"] == "moment"]
    assert moments == [("fc.weight", "exp_avg"), ("fc.weight", "exp_avg_sq")]


def test_the_rows_are_as_many_as_the_report_says_and_in_the_order_of_the_file(saved, check_report):
    report = scan(saved)
    rows = rows_of(report, check_report)
    assert len(rows) == report.target["tensors"]
    with open_checkpoint(saved) as checkpoint:
        inside = [(ref.role, ref.name, ref.entry) for ref in checkpoint]
    shown = [(row["role"], row["name"], row["entry"]) for row in rows]
    assert shown == [key for key in inside if key in set(shown)]
    assert list(scan(saved, jobs=3).tensors) == list(report.tensors)


def test_a_comparison_shows_the_rows_of_the_newer_checkpoint(saved, tmp_path, check_report):
    torch.save(state(3), tmp_path / "old.pt")
    assert rows_of(compare(saved, tmp_path / "old.pt"), check_report) == rows_of(scan(saved), check_report)
