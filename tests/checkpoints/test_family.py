"""Which folders are a training's checkpoints, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ampdoctor.checkpoints import series as family_module
from ampdoctor.checkpoints.found import find
from ampdoctor.errors import CheckpointError


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


def test_a_sharded_final_model_is_one_member(tmp_path):
    save_model(tmp_path / "checkpoint-5" / "model.safetensors")
    for part in (1, 2):
        save_file({f"w{part}": torch.ones(2)}, tmp_path / f"model-0000{part}-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w1": "model-00001-of-00002.safetensors", "w2": "model-00002-of-00002.safetensors"}}'
    )
    family = members(tmp_path)
    assert family is not None
    assert [member.name for member in family] == ["checkpoint-5", "(final model)"]
    with family[-1].open() as checkpoint:
        assert (len(checkpoint), checkpoint.errors) == (2, ())


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


@pytest.mark.parametrize("pattern", ["step-{}", "iter_{:07}", "global_step{}", "checkpoint_{}", "epoch_{}"])
def test_folders_of_steps(tmp_path, pattern):
    names = [pattern.format(number) for number in (2, 10, 1)]
    for name in names:
        save(tmp_path / name / "mp_rank_00" / "model.pt")
    assert listed(tmp_path) == [names[2], names[0], names[1]]


def test_a_distributed_checkpoint_is_a_member(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / ".metadata").touch()
    assert listed(tmp_path) == ["step-1", "step-2"]


def test_files_of_one_moment_are_one_checkpoint(tmp_path):
    for step in (100, 200):
        save(tmp_path / f"model_step_{step}.pt")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"optimizer_step_{step}.pt")
    family = members(tmp_path)
    assert family is not None
    assert [set(member.files) for member in family] == [
        {"model_step_100.pt", "optimizer_step_100.pt"},
        {"model_step_200.pt", "optimizer_step_200.pt"},
    ]


def test_files_of_ranks_are_one_checkpoint_a_step(tmp_path):
    for step in (100, 200, 300):
        for rank in (0, 1):
            save(tmp_path / f"ckpt_step{step}_rank{rank}.pt")
    family = members(tmp_path)
    assert family is not None
    assert [(member.step, len(member.files)) for member in family] == [(100, 2), (200, 2), (300, 2)]


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


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["model.safetensors", "model_1.safetensors", "model_2.safetensors"],
        ["model_0.safetensors", "model_1.safetensors"],
        ["model_rank_0.pt", "model_rank_1.pt", "model_rank_2.pt"],
        ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"],
        ["consolidated.00.pth", "consolidated.01.pth"],
        ["fold_10.pt", "fold_20.pt", "fold_30.pt"],
        ["model.pt", "optimizer.pt", "scaler.pt"],
        ["step_100.pt"],
    ],
)
def test_what_is_one_checkpoint_is_no_family(tmp_path, names):
    for name in names:
        if name.endswith("safetensors"):
            save_model(tmp_path / name)
        else:
            save(tmp_path / name)
    assert members(tmp_path) is None


def test_two_models_of_accelerate_are_no_family(tmp_path):
    model = nn.Linear(2, 2)
    for index, steps in ((1, 3), (2, 9)):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        save_file(model.state_dict(), tmp_path / f"model_{index}.safetensors")
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer_{index}.bin")
    assert members(tmp_path) is None


def test_other_architectures_are_no_family(tmp_path):
    for width in (10, 20, 30):
        save_model(tmp_path / f"model_{width}.safetensors", (width, 2))
    assert members(tmp_path) is None


def test_a_deepspeed_folder_inside_the_trainers_is_part_of_it(tmp_path):
    save(tmp_path / "global_step500" / "mp_rank_00_model_states.pt")
    save_model(tmp_path / "model.safetensors")
    (tmp_path / "latest").write_text("global_step500")
    (tmp_path / "scheduler.pt").touch()
    assert members(tmp_path) is None


def test_a_run_with_one_checkpoint_so_far(tmp_path):
    save_model(tmp_path / "checkpoint-500" / "model.safetensors")
    assert listed(tmp_path) == ["checkpoint-500"]


@pytest.mark.parametrize("steps", [(1, 2, 1, 2), (10, 20, 30, 40)])
def test_steps_that_begin_anew_in_each_epoch_go_by_epoch(tmp_path, steps):
    names = [f"epoch_{epoch}_iter_{step}.pt" for epoch, step in zip((1, 1, 2, 2), steps, strict=True)]
    for name in reversed(names):
        save(tmp_path / name)
    assert listed(tmp_path) == names


def test_a_data_sets_folder_is_not_looked_through(tmp_path, monkeypatch):
    for number in range(120):
        (tmp_path / f"class_{number:03}").mkdir()
    listed_folders = []
    real = family_module.list_folder
    monkeypatch.setattr(family_module, "list_folder", lambda folder: listed_folders.append(folder) or real(folder))
    assert members(tmp_path) is None
    assert listed_folders == []


def test_two_runs_are_no_family(tmp_path):
    for run in ("a", "b"):
        for step in (1, 2):
            save(tmp_path / run / f"step_{step}.pt")
    assert members(tmp_path) is None


def test_a_file_and_what_is_not_there_are_no_family(tmp_path):
    save(tmp_path / "ckpt_1.pt")
    assert members(tmp_path / "ckpt_1.pt") is None
    assert members(tmp_path / "nothing") is None


def test_a_folder_that_may_not_be_listed_is_one_sentence(tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ampdoctor.checkpoints.files.os.scandir", refuse)
    with pytest.raises(CheckpointError, match="cannot be listed: permission denied"):
        members(Path(tmp_path))
