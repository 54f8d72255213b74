"""Checkpoints of every layout put into real models and optimizers, which then hold what was saved."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError

FOLDER = Path(__file__).parents[3] / "fixtures" / "checkpoints"


def tiny_net():
    """The model that the checkpoints were made from."""
    spec = importlib.util.spec_from_file_location("layouts_tiny", FOLDER / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.TinyNet()


def truth_of(layout, path):
    told = json.loads((FOLDER / "expected" / f"{layout}.json").read_text(encoding="utf-8"))
    return next(row for row in told["checkpoints"] if row["path"] == path)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def matrices_first(kind, **settings):
    def make(model):
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return kind(groups, lr=1e-2, **settings)

    return make


def check(model, optimizer, truth, key="weights"):
    named = dict(model.named_parameters())
    for name, facts in truth[key].items():
        assert named[name].double().abs().max().item() == facts["amax"], name
        assert named[name].double().sum().item() == pytest.approx(facts["sum"], abs=1e-12), name
    for name, buffer in model.named_buffers():
        assert buffer.double().sum().item() == pytest.approx(truth["buffers"][name]["sum"], abs=1e-12), name
    for row in truth["moments"]:
        values = optimizer.state[named[row["parameter"]]][row["entry"]].double()
        assert list(values.shape) == row["shape"]
        assert values.sum().item() == pytest.approx(row["sum"], rel=1e-12, abs=1e-15), row["parameter"]


@pytest.mark.parametrize(
    ("layout", "path", "make", "prefix"),
    [
        ("torch_zip", "step4.pt", adamw, ""),
        ("torch_legacy", "step4.pt", adamw, ""),
        ("torch_objects", "last.pt", matrices_first(torch.optim.SGD, momentum=0.9), ""),
        ("torch_objects", "last_protocol4.pt", matrices_first(torch.optim.SGD, momentum=0.9), ""),
        ("torch_module", "model.pt", adamw, ""),
        ("accelerate", "checkpoint_0", adamw, ""),
        ("accelerate_bin", "checkpoint_0", adamw, ""),
        ("lightning_fp16", "checkpoints/last.ckpt", adamw, "net."),
        ("lightning_bf16", "checkpoints/epoch=0-step=2.ckpt", adamw, "net."),
        ("deepspeed_zero1", ".", adamw, ""),
        ("deepspeed_zero2", "global_step4", matrices_first(torch.optim.AdamW), ""),
        ("deepspeed_zero2_bf16", ".", matrices_first(torch.optim.AdamW), ""),
        ("deepspeed_zero3", ".", adamw, ""),
    ],
)
def test_a_layout_goes_into_the_model_and_the_optimizer(layout, path, make, prefix):
    truth = truth_of(layout, path)
    loaded = load_state(FOLDER / layout / path)
    assert loaded.model is not None
    assert loaded.errors == ()
    model = nn.Module()
    model.net = tiny_net()
    model = model if prefix else model.net
    key = "masters" if layout == "deepspeed_zero3" else "weights"
    weights = {facts["dtype"] for facts in truth[key].values()}
    if weights != {"float32"}:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, *weights))
    model.load_state_dict(loaded.model)
    optimizer = make(model)
    if truth["moments"]:
        optimizer.load_state_dict(loaded.optimizer)
    else:
        assert loaded.optimizer is None
    if "deepspeed" in layout and key == "weights":
        for saved in loaded.optimizer["state"].values() if loaded.optimizer else ():
            assert saved["exp_avg"].dtype == torch.float32
        truth = {**truth, "moments": []}  # a plain optimizer casts them to the parameters' half precision
    check(model, optimizer, truth, key)
    if truth["scaler"] is not None:
        assert float(loaded.scaler.get("scale", loaded.scaler.get("cur_scale"))) == truth["scaler"]["scale"]
    if truth["step"] is not None:
        assert loaded.global_step == truth["step"]


def test_counters_that_lie_in_the_file_once_are_one_for_each_parameter():
    loaded = load_state(FOLDER / "deepspeed_zero1" / "global_step4")
    assert loaded.optimizer is not None
    model = tiny_net()
    optimizer = adamw(model)
    optimizer.load_state_dict(loaded.optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


def test_a_model_of_several_ranks_that_cannot_be_joined_is_not_loaded_by_half(tmp_path):
    shutil.copytree(FOLDER / "megatron_old", tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds 2 models"):
        load_state(tmp_path / "run")
