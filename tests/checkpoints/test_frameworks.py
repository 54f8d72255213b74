"""What frameworks put beside the weights under their own names: averages, counters, scalers, odd optimizer states."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from torch import nn

from ampdoctor.checkpoints.folder import open_checkpoint


class Net(nn.Module):
    def __init__(self, fill=1.0):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, fill + number)


def state(fill=1.0):
    return Net(fill).state_dict()


PARAMETERS = [name for name, _ in Net().named_parameters()]


def adam(model=None):
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def names(checkpoint, role, group=""):
    return [ref.name for ref in checkpoint if (ref.role, ref.group) == (role, group)]


def save(tmp_path, content):
    torch.save(content, tmp_path / "c.pt")
    return tmp_path / "c.pt"


@pytest.mark.parametrize(
    ("content", "group"),
    [
        ({"state_dict": state(), "state_dict_ema": state(2.0), "epoch": 3}, "state_dict_ema"),
        ({"model": state(), "model_ema": {"module": state(2.0)}}, "model_ema.module"),
        ({"model": state(), "swa_model": state(2.0)}, "swa_model"),
        (
            {"state_dict": state(), "callbacks": {"WeightAveraging": {"average_state": state(2.0)}}},
            "callbacks.WeightAveraging.average_state",
        ),
    ],
    ids=["timm", "detectron", "swa", "lightning-averaging"],
)
def test_averages_are_a_role_of_their_own(tmp_path, content, group):
    with open_checkpoint(save(tmp_path, content)) as checkpoint:
        assert names(checkpoint, "weight") == PARAMETERS
        averages = {ref.name: ref.stored.load().flatten()[0].item() for ref in checkpoint if ref.role == "ema"}
        assert {ref.group for ref in checkpoint if ref.role == "ema"} == {group}
        assert averages["embed.weight"] == 2.0
        assert averages.keys() == state().keys()


@pytest.mark.parametrize("key", ["ema", "ema_state"])
def test_an_average_that_is_a_list_gets_the_names_of_the_parameters(tmp_path, key):
    shadow = [parameter.detach().clone() for parameter in Net(5.0).parameters()]
    average = {"decay": 0.999, "num_updates": 4, "shadow_params": shadow, "collected_params": []}
    with open_checkpoint(save(tmp_path, {"model": state(), key: average})) as checkpoint:
        averaged = {ref.name: ref.stored.load().flatten()[0].item() for ref in checkpoint if ref.role == "ema"}
        assert averaged == {name: 5.0 + number for number, name in enumerate(PARAMETERS)}


def test_an_average_alone_is_the_model(tmp_path):
    with open_checkpoint(save(tmp_path, {"model": None, "ema": Net().half(), "updates": 7})) as checkpoint:
        assert names(checkpoint, "weight") == PARAMETERS
        assert names(checkpoint, "buffer") == [name for name, _ in Net().named_buffers()]


def test_fairseq(tmp_path):
    content = {
        "args": Namespace(arch="transformer"),
        "cfg": {"model": {"_name": "transformer"}},
        "model": state(),
        "criterion": {},
        "optimizer_history": [{"num_updates": 5}, {"num_updates": 90, "criterion_name": "x"}],
        "extra_state": {"epoch": 2, "val_loss": 1.0},
        "last_optimizer_state": {**adam(), "loss_scale": 0.25},
    }
    with open_checkpoint(save(tmp_path, content)) as checkpoint:
        assert checkpoint.global_step == 90
        assert [s.scale for s in checkpoint.scalers] == [0.25]
        assert set(names(checkpoint, "moment")) == set(PARAMETERS) == set(names(checkpoint, "weight"))


@pytest.mark.parametrize(
    "content",
    [
        {"model": state(), "optimizer": adam(), "model_args": {}, "iter_num": 30, "best_val_loss": torch.tensor(1e9)},
        {"meta": {"epoch": 1, "iter": 30}, "state_dict": state(), "message_hub": {"log": {}}, "optimizer": adam()},
        {"model": state(), "train_state": {"step": 30}},
    ],
    ids=["nanogpt", "mmengine", "torchtitan"],
)
def test_the_step_is_found_under_each_frameworks_name(tmp_path, content):
    with open_checkpoint(save(tmp_path, content)) as checkpoint:
        assert checkpoint.global_step == 30
        assert names(checkpoint, "weight") == PARAMETERS
        assert {ref.role for ref in checkpoint} <= {"weight", "buffer", "moment", "other"}


def test_apex_keeps_its_copies_and_its_scale(tmp_path):
    copies = [[parameter.detach().clone() for parameter in Net(3.0).parameters()]]
    optimizer = {"optimizer_state_dict": adam(), "fp32_from_fp16": copies, "dynamic_loss_scale": True}
    amp = {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 9}}
    with open_checkpoint(save(tmp_path, {"model": state(), "optimizer": optimizer, "amp": amp})) as checkpoint:
        assert [(s.scale, s.growth_tracker) for s in checkpoint.scalers] == [(512.0, 9)]
        master_weights = {ref.name: ref.stored.load().flatten()[0].item() for ref in checkpoint if ref.group == "fp32"}
        assert master_weights == {name: 3.0 + number for number, name in enumerate(PARAMETERS)}
        assert {ref.role for ref in checkpoint if ref.group == "fp32"} == {"weight"}


def test_flat_fp32_copies_are_weights_without_names(tmp_path):
    scaler = {"cur_scale": 4.0, "cur_iter": 3, "last_overflow_iter": 0, "scale_factor": 2.0, "scale_window": 100}
    optimizer = {"optimizer_state_dict": adam(), "fp32_groups_flat": [torch.ones(40)], **scaler}
    with open_checkpoint(save(tmp_path, {"module": state(), "optimizer": optimizer, "global_steps": 3})) as checkpoint:
        assert names(checkpoint, "weight", "fp32") == ["optimizer.fp32_groups_flat.0"]
        assert [(s.scale, s.growth_interval) for s in checkpoint.scalers] == [(4.0, 100)]
        assert set(names(checkpoint, "moment")) == set(PARAMETERS)


def test_megatron_nests_one_model(tmp_path):
    nest = {
        "language_model": {
            "embedding": {"word_embeddings": {"weight": torch.ones(6, 4)}},
            "encoder": {"layers.0.mlp.weight": torch.ones(4, 4)},
        }
    }
    grad_scaler = {"scale": torch.tensor([64.0]), "growth_tracker": 7, "hysteresis_tracker": 2}
    content = {
        "args": Namespace(loss_scale_window=500, min_loss_scale=4.0),
        "checkpoint_version": 3.0,
        "iteration": 11,
        "model": nest,
        "optimizer": {"optimizer": {"state": {}, "param_groups": []}, "grad_scaler": grad_scaler},
        "rng_state": [
            {"torch_rng_state": torch.zeros(8), "rng_tracker_states": {"model-parallel-rng": torch.zeros(8)}}
        ],
    }
    folder = tmp_path / "iter_0000011" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save(content, folder / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("11")
    with open_checkpoint(tmp_path) as checkpoint:
        assert names(checkpoint, "weight") == [
            "language_model.embedding.word_embeddings.weight",
            "language_model.encoder.layers.0.mlp.weight",
        ]
        (scaler,) = checkpoint.scalers
        assert (scaler.scale, scaler.growth_tracker, scaler.growth_interval, scaler.min_scale) == (64.0, 7, 500, 4.0)
        assert checkpoint.global_step == 11


@pytest.mark.parametrize(("args", "interval"), [({"loss_scale_window": 4000}, 4000), ({}, 1501)])
def test_megatrons_window_is_larger_than_its_counter(tmp_path, args, interval):
    grad_scaler = {"scale": torch.tensor([64.0]), "growth_tracker": 1500, "hysteresis_tracker": 2}
    content = {"args": Namespace(**args), "checkpoint_version": 3.0, "model": state(), "optimizer": {"x": grad_scaler}}
    with open_checkpoint(save(tmp_path, content)) as checkpoint:
        assert [s.growth_interval for s in checkpoint.scalers] == [interval]


def adafactor(p):
    if p.dim() < 2:
        return {"exp_avg_sq": torch.ones_like(p)}
    return {"exp_avg_sq_row": torch.ones(p.shape[:-1]), "exp_avg_sq_col": torch.ones(p.shape[:-2] + p.shape[-1:])}


OTHERS = {
    "8-bit": (
        lambda p: {"state1": p.to(torch.uint8), "absmax1": torch.ones(1), "qmap1": torch.ones(256), "step": 4},
        {"state1": "moment", "absmax1": "moment", "qmap1": "other"},
    ),
    "lion": (lambda p: {"exp_avg": torch.ones_like(p)}, {"exp_avg": "moment"}),
    "adafactor": (adafactor, dict.fromkeys(("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"), "moment")),
    "shampoo": (
        lambda p: {"step": torch.tensor(1.0), "preconditioner": {"0": {"factor": torch.ones(len(p), len(p))}}},
        {"preconditioner.0.factor": "moment", "step": "other"},
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_states_of_other_optimizers_have_roles_and_names(tmp_path, kind):
    make, roles = OTHERS[kind]
    state = {number: make(p.detach()) for number, p in enumerate(Net().parameters())}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    with open_checkpoint(save(tmp_path, {"model": Net().state_dict(), "optimizer": optimizer})) as checkpoint:
        refs = [ref for ref in checkpoint if ref.role in {"moment", "other"}]
        assert {ref.entry: ref.role for ref in refs} == roles
        assert {ref.name for ref in refs} == set(PARAMETERS)


def test_torchs_adafactor_is_named_by_its_factors(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    optimizer = torch.optim.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with open_checkpoint(save(tmp_path, content)) as checkpoint:
        rows = {ref.name: ref.shape for ref in checkpoint if ref.entry == "row_var"}
        assert rows == {"0.weight": (3, 1), "1.weight": (5, 1)}


class Packed:
    """A quantised weight of some library: an object that holds its integers and their scales."""

    def __init__(self):
        self.int_data = torch.zeros(4, 4, dtype=torch.int8)
        self.scale = torch.ones(4)


def test_quantised_weights_are_not_passed_over(tmp_path):
    with open_checkpoint(save(tmp_path, {"a.weight": torch.ones(2), "b.weight": Packed()})) as checkpoint:
        assert {ref.name for ref in checkpoint} == {"a.weight", "b.weight.int_data", "b.weight.scale"}


def test_a_flat_average_is_told_from_the_weights(tmp_path):
    """Stable Diffusion: names behind `model_ema.` are without dots."""
    weights = {"model.diffusion_model.in.0.weight": torch.ones(2, 2), "model.diffusion_model.out.weight": torch.ones(2)}
    average = {f"model_ema.{name.removeprefix('model.').replace('.', '')}": w for name, w in weights.items()}
    torch.save({"state_dict": {**weights, **average, "model_ema.decay": torch.tensor(0.9)}}, tmp_path / "sd.ckpt")
    assert roles(tmp_path / "sd.ckpt") == {**dict.fromkeys(weights, "weight"), **dict.fromkeys(average, "ema")} | {
        "model_ema.decay": "ema"
    }


def test_a_module_that_only_sounds_like_an_average_is_none(tmp_path):
    torch.save({"shadow_net.0.weight": torch.ones(2, 2), "head.weight": torch.ones(2)}, tmp_path / "c.pt")
    assert set(roles(tmp_path / "c.pt").values()) == {"weight"}


def roles(path):
    with open_checkpoint(path) as checkpoint:
        return {ref.name: ref.role for ref in checkpoint}


@pytest.mark.parametrize("scale", [0.0, 1024.0])
def test_a_scaler_that_was_pickled_whole_is_read(tmp_path, scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 2.0)
    scaler.scale(torch.ones(()))
    scaler.update(scale)
    torch.save({"model": {"w": torch.ones(2)}, "scaler": scaler}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert [(s.scale, s.growth_factor, s.growth_interval) for s in checkpoint.scalers] == [(scale, 2.0, 2000)]
