"""Names of numbered parameters beside sorted weights: every one that is given is right."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from ampdoctor.checkpoints import open_checkpoint
from ampdoctor.checkpoints.parameter_names import place_names


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 2)
        self.v_proj, self.o_proj = nn.Linear(8, 2), nn.Linear(8, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(8), Attention(), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class Transformer(nn.Module):
    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.wte = nn.Embedding(50, 8)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50, bias=False)


class Residual(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, wide, 3), nn.BatchNorm2d(wide)
        self.conv2, self.bn2 = nn.Conv2d(wide, wide, 3), nn.BatchNorm2d(wide)


def convolutional() -> nn.Module:
    net = nn.Module()
    net.conv1, net.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    net.layer1, net.layer2 = nn.Sequential(Residual(4), Residual(4)), nn.Sequential(Residual(4), Residual(4))
    net.fc = nn.Linear(4, 10)
    return net


def shapes_of(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize(
    ("make", "certain"),
    [(Transformer, 0.2), (convolutional, 0.5), (Block, 0.5)],
    ids=["transformer", "resnet", "block"],
)
def test_what_is_placed_is_placed_right(make, certain):
    named = shapes_of(make())
    placed = place_names(sorted(named), [shape for _, shape in named])
    assert placed is not None
    assert all(named[at][0] == name for at, name in placed.items())
    assert len(placed) >= certain * len(named)


def test_other_parameters_than_these_have_no_names():
    named = shapes_of(Block())
    assert place_names(sorted(named), [shape for _, shape in named[1:]]) is None
    assert place_names(sorted(named), [(7,), *(shape for _, shape in named[1:])]) is None
    assert place_names([("a.weight", (2,)), ("b.weight", (2,))], [(2,), (2,)]) == {}


def test_children_without_end_give_no_names_instead_of_no_answer():
    named = [(f"{chr(97 + n)}.weight", (4,)) for n in range(26)]
    assert place_names(named, [(4,)] * 26) == {}


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_a_random_tree_never_gets_a_wrong_name(seed):
    chance = random.Random(seed)

    def grow(depth: int) -> list[tuple[str, tuple[int, ...]]]:
        names = chance.sample(["alpha", "beta", "gamma", "0", "1", "fc1", "fc2"], k=chance.randint(1, 4))
        numbered = iter(sorted(n for n in names if n[-1].isdigit()))
        ordered = [next(numbered) if name[-1].isdigit() else name for name in names]
        found = [(entry, (chance.randint(1, 3),)) for entry in ("weight", "bias") if chance.random() < 0.4]
        for name in ordered:
            below = grow(depth - 1) if depth and chance.random() < 0.6 else [("weight", (chance.randint(1, 3),))]
            found += [(f"{name}.{inner}", shape) for inner, shape in below]
        return found

    named = grow(2)
    placed = place_names(sorted(named), [shape for _, shape in named])
    assert placed is not None
    assert all(named[at][0] == name for at, name in placed.items())


def test_a_folder_with_sorted_weights_names_its_moments(tmp_path):
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    expected = {name: float(number) for number, (name, _) in enumerate(model.named_parameters())}
    with open_checkpoint(tmp_path) as checkpoint:
        held = {ref.name: ref.stored.load().flatten()[0].item() for ref in checkpoint if ref.role == "moment"}
    named = {name: value for name, value in held.items() if not name.startswith("param ")}
    assert named.items() <= expected.items()
    assert len(named) >= len(expected) / 2  # that a block begins with its normalisation would fit as well
