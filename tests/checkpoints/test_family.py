"""Which folders are a training's checkpoints, and in which order."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ampdoctor.checkpoints.found import find


def save(path, **extra):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"w": torch.ones(2)}, **extra}, path)


def save_model(path, shape=(2, 2)):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(shape)}, path)


def members(path):
    return find(path).members or None


def listed(path):
    family = members(path)
    return None if family is None else [member.name for member in family if member.placed]


def test_the_trainers_folders_are_in_order_and_the_final_model_is_the_last(tmp_path):
    for step in (500, 1000, 1500):
        save_model(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"checkpoint-{step}" / "optimizer.pt")
    save_model(tmp_path / "model.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"never opened")
    assert listed(tmp_path) == ["checkpoint-500", "checkpoint-1000", "checkpoint-1500", "(final model)"]
    family = members(tmp_path)
    with family[-1].open() as checkpoint:
        assert [file.path for file in checkpoint.files] == ["model.safetensors"]


def test_lightning_orders_by_step_with_versions_and_last(tmp_path):
    folder = tmp_path / "checkpoints"
    for name, step in (
        ("epoch=1-step=200.ckpt", 200),
        ("epoch=0-step=50.ckpt", 50),
        ("epoch=1-step=200-v1.ckpt", 200),
        ("last.ckpt", 210),
    ):
        save(folder / name, global_step=step)
    expected = ["epoch=0-step=50.ckpt", "epoch=1-step=200.ckpt", "epoch=1-step=200-v1.ckpt", "last.ckpt"]
    assert listed(folder) == expected
    assert listed(tmp_path) == [f"checkpoints/{name}" for name in expected]
    family = members(tmp_path)
    assert [(member.step, member.inside) for member in family][-1] == (210, "checkpoints")


@pytest.mark.parametrize(
    ("files", "order"),
    [
        (
            {**{f"model_step_{step}.pt": {} for step in (100, 200, 300)}, "last.ckpt": {"global_step": 250}},
            ["model_step_100.pt", "model_step_200.pt", "last.ckpt", "model_step_300.pt"],
        ),
        ({f"model_{n}.pt": {"global_step": 10 * n} for n in (1, 2, 3)}, [f"model_{n}.pt" for n in (1, 2, 3)]),
        ({f"epoch_{n}.pth": {} for n in (9, 10)}, ["epoch_9.pth", "epoch_10.pth"]),
    ],
)
def test_the_order_is_that_of_the_stored_steps_and_of_the_names(tmp_path, files, order):
    for name, extra in files.items():
        save(tmp_path / name, **extra)
    (tmp_path / "latest.pth").symlink_to(order[-1])  # a link to a member is no member
    assert listed(tmp_path) == order


def test_what_cannot_be_placed_is_named_and_comes_last(tmp_path):
    for epoch in (1, 2):
        save(tmp_path / f"epoch_{epoch}.pth")
    save(tmp_path / "best.pth")
    save(tmp_path / "last.pth")
    family = members(tmp_path)
    assert [(member.name, member.placed) for member in family] == [
        ("epoch_1.pth", True),
        ("epoch_2.pth", True),
        ("last.pth", True),
        ("best.pth", False),
    ]


def test_numbers_without_a_word_are_steps_where_they_are_evenly_far_apart(tmp_path):
    for number in (500, 1000, 2000):
        save(tmp_path / f"net_{number:05}.pth")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"opt_{number:05}.pth")
    family = members(tmp_path)
    assert [(m.step, len(m.files)) for m in family] == [(500, 2), (1000, 2), (2000, 2)]


def test_other_architectures_and_two_models_of_accelerate_are_no_family(tmp_path):
    for width in (10, 20, 30):
        save_model(tmp_path / "widths" / f"model_{width}.safetensors", (width, 2))
    assert members(tmp_path / "widths") is None
    model = nn.Linear(2, 2)
    for index, steps in ((1, 3), (2, 9)):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        save_file(model.state_dict(), tmp_path / f"model_{index}.safetensors")
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer_{index}.bin")
    assert members(tmp_path) is None


def test_a_deepspeed_folder_inside_the_trainers_is_part_of_it(tmp_path):
    save(tmp_path / "global_step500" / "mp_rank_00_model_states.pt")
    save_model(tmp_path / "model.safetensors")
    (tmp_path / "latest").write_text("global_step500")
    (tmp_path / "scheduler.pt").touch()
    assert members(tmp_path) is None


@pytest.mark.parametrize("steps", [(1, 2, 1, 2), (10, 20, 30, 40)])
def test_steps_that_begin_anew_in_each_epoch_go_by_epoch(tmp_path, steps):
    names = [f"epoch_{epoch}_iter_{step}.pt" for epoch, step in zip((1, 1, 2, 2), steps, strict=True)]
    for name in reversed(names):
        save(tmp_path / name)
    assert listed(tmp_path) == names
