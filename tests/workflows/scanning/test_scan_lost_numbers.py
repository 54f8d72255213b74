"""What scan finds non-finite outside of state dicts is a finding, and what it has not read is not healthy."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch

from ampdoctor.workflows.scan import scan

NAN, INF = math.nan, math.inf
FINE = {"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}
BAD = FINE["w"].clone()
BAD[1, 2] = NAN


def found(path):
    report = scan(path)
    assert report.complete == (not report.errors)
    return report.verdict, {(f.code, f.severity) for f in report.findings if f.code != "AMP109"}


@pytest.mark.parametrize(
    "saved",
    [
        BAD,
        torch.nn.Parameter(BAD),
        torch.tensor(NAN),
        [FINE["w"], BAD],
        (FINE["w"], BAD),
        {"generator": {"a": FINE["w"]}, "discriminator": {"b": BAD}},
        {"a": {"b": {"c": BAD}}},
        {0: FINE["w"], 1: BAD},
        OrderedDict(w=(FINE["w"], BAD)),
    ],
)
def test_tensors_that_are_no_state_dict(tmp_path, saved):
    torch.save(saved, tmp_path / "x.pt")
    assert found(tmp_path / "x.pt") == ("sick", {("AMP101", "error")})
    assert found(tmp_path) == ("sick", {("AMP101", "error")})


@pytest.mark.parametrize(
    ("beside", "code", "severity"),
    [
        ({"metrics": {"train": {"loss": NAN}}}, "AMP722", "error"),
        ({"losses": [2.0, 1.5, NAN]}, "AMP722", "error"),
        ({"losses": [torch.tensor(2.0), torch.tensor(NAN)]}, "AMP722", "error"),
        ({"losses": np.array([2.0, NAN])}, "AMP722", "error"),
        ({"stats": {"running_loss": torch.tensor(INF)}}, "AMP722", "error"),
        ({"loss": 2.0, "epoch_loss": NAN}, "AMP722", "error"),
        ({"val_loss": NAN}, "AMP108", "warning"),
        ({"val": {"loss": NAN}}, "AMP108", "warning"),
        ({"grad_norm": torch.tensor(NAN)}, "AMP108", "warning"),
        ({"scheduler": {"_last_lr": [NAN]}}, "AMP108", "warning"),
        ({"mean": np.array([[0.5], [NAN]], dtype=np.float32)}, "AMP108", "warning"),
        ({"loss_scale_log": [NAN]}, "AMP108", "warning"),
        ({"losses": [2.0, NAN, 1.5]}, "AMP108", "note"),
    ],
)
def test_numbers_beside_a_healthy_model(tmp_path, beside, code, severity):
    torch.save({"model": FINE, **beside}, tmp_path / "x.pt")
    assert found(tmp_path / "x.pt") == ("sick" if severity == "error" else "healthy", {(code, severity)})


@pytest.mark.parametrize(
    "beside",
    [
        {"best_loss": INF, "best": {"loss": INF, "acc": -INF}, "last_loss": INF},
        {"early_stopping": {"best_score": torch.tensor(INF)}, "args": {"max_norm": INF}},
        {"losses": [INF, 2.0, 1.5], "history": np.array([2.0, 1.5])},
        {"rng_state": torch.get_rng_state(), "numpy": np.random.RandomState(0).get_state()},
        {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}},
        {"scaler": torch.amp.GradScaler("cpu").state_dict()},
        {"steps": [1, 2, 3], "names": ["nan", "inf"], "flags": {True, False}},
        {"adjacency": torch.eye(3).to_sparse()},
    ],
)
def test_what_a_healthy_training_saves_beside_its_model(tmp_path, beside):
    torch.save({"model": FINE, **beside}, tmp_path / "x.pt")
    assert found(tmp_path / "x.pt") == ("healthy", set())


def test_the_loss_is_told_once(tmp_path):
    torch.save({"model": FINE, "loss": NAN}, tmp_path / "x.pt")
    (finding,) = scan(tmp_path / "x.pt").findings
    assert (finding.code, finding.where.tensor) == ("AMP722", None)


def test_a_file_of_a_loss_alone(tmp_path):
    torch.save({"loss": NAN}, tmp_path / "x.pt")
    assert found(tmp_path / "x.pt") == ("sick", {("AMP722", "error")})


def test_a_file_without_tensors_is_not_healthy(tmp_path):
    torch.save({"w": np.array([[1.0, NAN]])}, tmp_path / "x.pt")
    report = scan(tmp_path / "x.pt")
    assert report.verdict == "inconclusive"
    assert [error.message for error in report.errors] == [
        "x.pt was not examined: it holds no tensor, and only its other numbers were looked at."
    ]


def test_values_of_a_sparse_tensor_are_examined(tmp_path):
    torch.save({"model": {**FINE, "emb": BAD.to_sparse()}}, tmp_path / "x.pt")
    report = scan(tmp_path / "x.pt")
    assert [(f.code, f.where.tensor) for f in report.findings] == [("AMP108", "model.emb.values")]


def test_a_tensor_whose_values_are_not_read_is_not_healthy(tmp_path):
    mirrored = torch.ones(2, dtype=torch.complex64).conj()
    torch.save({"model": {**FINE, "mirrored": mirrored}}, tmp_path / "x.pt")
    report = scan(tmp_path / "x.pt")
    assert report.verdict == "inconclusive"
    assert [error.message for error in report.errors] == [
        "model.mirrored was not examined: a tensor that is conjugated or negated on reading is not read."
    ]


def test_weights_in_a_format_that_is_not_read(tmp_path):
    optimizer = {"state": {0: {"exp_avg": FINE["w"]}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(optimizer, tmp_path / "optimizer.pt")
    np.save(tmp_path / "weights.npy", BAD.numpy())
    report = scan(tmp_path)
    assert report.verdict == "inconclusive"
    assert [error.what for error in report.errors] == ["weights.npy"]
    torch.save(FINE, tmp_path / "model.pt")  # beside weights that are read it is another copy, and named
    report = scan(tmp_path)
    assert (report.verdict, [one.what for one in report.skipped]) == ("healthy", ["weights.npy"])
