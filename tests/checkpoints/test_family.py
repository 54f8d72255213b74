"""Which folders are a training's checkpoints, and in which order."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

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
    assert family is not None
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
    assert family is not None
    assert [(member.step, member.inside) for member in family][-1] == (210, "checkpoints")


def test_last_stands_where_its_stored_step_is(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path / f"model_step_{step}.pt")
    save(tmp_path / "last.ckpt", global_step=250)
    assert listed(tmp_path) == ["model_step_100.pt", "model_step_200.pt", "last.ckpt", "model_step_300.pt"]


def test_a_link_to_a_member_is_no_member(tmp_path):
    for epoch in (9, 10):
        save(tmp_path / f"epoch_{epoch}.pth")
    (tmp_path / "latest.pth").symlink_to("epoch_10.pth")
    assert listed(tmp_path) == ["epoch_9.pth", "epoch_10.pth"]


def test_what_cannot_be_placed_is_named_and_comes_last(tmp_path):
    for epoch in (1, 2):
        save(tmp_path / f"epoch_{epoch}.pth")
    save(tmp_path / "best.pth")
    save(tmp_path / "last.pth")
    family = members(tmp_path)
    assert family is not None
    assert [(member.name, member.placed) for member in family] == [
        ("epoch_1.pth", True),
        ("epoch_2.pth", True),
        ("last.pth", True),
        ("best.pth", False),
    ]


def test_numbers_without_a_word_are_steps_where_the_files_say_so(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path / f"model_{number}.pt", global_step=10 * number)
    assert listed(tmp_path) == ["model_1.pt", "model_2.pt", "model_3.pt"]


def test_numbers_without_a_word_are_steps_where_they_are_evenly_far_apart(tmp_path):
    for number in (500, 1000, 2000):
        save(tmp_path / f"net_{number:05}.pth")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"opt_{number:05}.pth")
    family = members(tmp_path)
    assert family is not None
    assert [(m.step, len(m.files)) for m in family] == [(500, 2), (1000, 2), (2000, 2)]


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
