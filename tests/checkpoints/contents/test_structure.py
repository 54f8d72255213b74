from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.checkpoints.file_contents import clean_names
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state

SCALER = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))  # the Trainer's rule decays it, one by shapes does not
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10)


def trained(model, make_optimizer):
    """State of an optimizer after one step in which parameter number n (of named_parameters) got the gradient n + 1."""
    optimizer = make_optimizer(model)
    for number, parameter in enumerate(model.parameters(), start=1):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return optimizer.state_dict()


def check_names(path, model, entry, factor):
    """Every named moment must hold the gradient of the parameter that it is named after; how many are named."""
    expected = {name: float(number) for number, (name, _) in enumerate(model.named_parameters(), start=1)}
    named = 0
    with open_checkpoint(path) as checkpoint:
        for ref in checkpoint:
            if ref.role == "moment" and ref.entry == entry and ref.name in expected:
                assert float(ref.stored.load().flatten()[0]) == pytest.approx(factor * expected[ref.name])
                assert ref.module == ref.name.rpartition(".")[0]
                named += 1
    return named


def by_dimension(model):
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def as_the_trainer_does(model):
    named = list(model.named_parameters())
    decayed = {n for n, _ in named if not n.endswith("bias") and "norm" not in n}
    return torch.optim.AdamW(
        [{"params": [p for n, p in named if n in decayed]}, {"params": [p for n, p in named if n not in decayed]}]
    )


@pytest.mark.parametrize(
    ("make_optimizer", "entry", "factor"),
    [
        (lambda m: torch.optim.AdamW(m.parameters()), "exp_avg", 0.1),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "momentum_buffer", 1.0),
        (lambda m: torch.optim.AdamW(list(m.named_parameters())[::-1]), "exp_avg", 0.1),  # the file gives the names
        (by_dimension, "exp_avg", 0.1),
        (as_the_trainer_does, "exp_avg", 0.1),
    ],
    ids=["adamw", "sgd", "named", "by-dimension", "trainer"],
)
def test_moments_get_the_name_of_their_parameter(tmp_path, make_optimizer, entry, factor):
    model = Net()
    torch.save({"model": model.state_dict(), "optimizer": trained(model, make_optimizer)}, tmp_path / "c.pt")
    assert check_names(tmp_path / "c.pt", model, entry, factor) == len(list(model.parameters()))


def test_a_frozen_part_leaves_no_wrong_name(tmp_path):
    model = Net()
    model.embed.weight.requires_grad = False
    model.blocks[1].requires_grad_(requires_grad=False)
    state = trained(model, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]))
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "c.pt")
    # gate and norm.* come first and head.* last; of three equal blocks two were trained, and which two cannot be told
    assert check_names(tmp_path / "c.pt", model, "exp_avg", 0.1) >= 1


def test_tied_weights_count_once_in_the_order(tmp_path):
    model = Net()
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embed.weight
    state = trained(model, lambda m: torch.optim.AdamW(m.parameters()))
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "c.pt")
    assert check_names(tmp_path / "c.pt", model, "exp_avg", 0.1) == len(list(model.parameters()))


def test_two_models_with_two_optimizers_keep_apart(tmp_path):
    generator, critic = nn.Linear(3, 5), nn.Linear(5, 1)
    torch.save(
        {
            "G": generator.state_dict(),
            "D": critic.state_dict(),
            "opt_G": trained(generator, lambda m: torch.optim.AdamW(m.parameters())),
            "opt_D": trained(critic, lambda m: torch.optim.AdamW(m.parameters())),
        },
        tmp_path / "gan.pt",
    )
    with open_checkpoint(tmp_path / "gan.pt") as checkpoint:
        moments = {(ref.group, ref.name, ref.shape) for ref in checkpoint if ref.entry == "exp_avg"}
        weights = {(ref.group, ref.name) for ref in checkpoint if ref.role == "weight"}
    assert moments == {
        ("opt_G", "weight", (5, 3)),
        ("opt_G", "bias", (5,)),
        ("opt_D", "weight", (1, 5)),
        ("opt_D", "bias", (1,)),
    }
    assert weights == {("", "weight"), ("", "bias"), ("D", "weight"), ("D", "bias")}
    loaded = load_state(tmp_path / "gan.pt")
    assert list(loaded.models) == ["G", "D"]
    assert set(loaded.optimizers) == {"opt_G", "opt_D"}
    assert loaded.optimizer is None


def test_a_bare_optimizer_and_a_bare_scaler_are_recognised(tmp_path):
    torch.save(trained(nn.Linear(2, 2), lambda m: torch.optim.AdamW(m.parameters())), tmp_path / "o.pt")
    torch.save(SCALER, tmp_path / "s.pt")
    with open_checkpoint(tmp_path / "o.pt") as checkpoint:
        assert {ref.name for ref in checkpoint} == {"param 0", "param 1"}
        assert checkpoint.global_step == 1
    with open_checkpoint(tmp_path / "s.pt") as checkpoint:
        assert [s.scale for s in checkpoint.scalers] == [64.0]


def test_scaler_values_saved_as_tensors_and_apex_scalers_are_numbers(tmp_path):
    as_tensors = {key: torch.tensor(value) for key, value in SCALER.items()}
    torch.save({"scaler": as_tensors, "amp": {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 4}}}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert [(s.key, s.scale, s.growth_tracker) for s in checkpoint.scalers] == [
            ("scaler", 64.0, 5),
            ("amp.loss_scaler0", 8.0, 4),
        ]


def test_roles_are_told_apart(tmp_path):
    state = Net().state_dict() | {"attn.mask": torch.zeros(2, 2), "decoder.mask_token": torch.zeros(2)}
    loose = {"loss": torch.tensor(1.0), "best_loss": torch.tensor(float("inf")), "prior": torch.ones(3)}
    torch.save({"model": state, **loose}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        roles = {ref.name: ref.role for ref in checkpoint}
    assert roles["norm.running_var"] == roles["attn.mask"] == "buffer"
    assert roles["norm.weight"] == roles["decoder.mask_token"] == "weight"
    assert roles["prior"] == "other"
    assert not roles.keys() & {"loss", "best_loss"}  # numbers that a log holds, whether as tensors or as floats


@pytest.mark.parametrize(
    ("names", "clean"),
    [
        (["module.a.weight", "module.b"], ["a.weight", "b"]),
        (["module.a.weight", "other.b"], ["module.a.weight", "other.b"]),
        (["_orig_mod.a.weight", "_orig_mod.b"], ["a.weight", "b"]),
        (["module._orig_mod.a", "module._orig_mod.layers.0._orig_mod.b"], ["a", "layers.0.b"]),
        ([], []),
    ],
)
def test_wrapper_prefixes_are_stripped_only_where_they_are_wrappers(names, clean):
    assert list(clean_names(names).values()) == clean
