from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError, LimitExceededError

if TYPE_CHECKING:
    from pathlib import Path

SCALER = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}


def write_sharded(folder: Path, *, suffix: str = "safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    table = {}
    for number, names in enumerate((("a.weight", "a.bias"), ("b.weight",)), start=1):
        shard = f"model-0000{number}-of-00002.{suffix}"
        tensors = {name: torch.full((3,), float(number)) for name in names}
        if suffix == "safetensors":
            save_file(tensors, folder / shard)
        else:
            torch.save(tensors, folder / shard)
        table.update(dict.fromkeys(names, shard))
    index = folder / f"model.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": table}))
    return index


@pytest.fixture
def trainer_folder(tmp_path):
    """The layout that the Hugging Face Trainer writes."""
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(SCALER, folder / "scaler.pt")
    torch.save({"last_lr": [0.1]}, folder / "scheduler.pt")
    (folder / "training_args.bin").write_bytes(b"\x80\x04never opened")
    (folder / "rng_state.pth").write_bytes(b"\x80\x04never opened")
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    history = [
        {"step": 10, "loss": 2.5, "grad_norm": 1.5, "learning_rate": 0.001},
        {"step": 20, "loss": float("nan"), "grad_norm": "nan"},
        {"step": 20, "eval_loss": 2.0},
        {"train_runtime": 3.0},
    ]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 500, "log_history": history}))
    return folder


def test_a_trainers_folder_gives_weights_moments_scaler_and_step(trainer_folder):
    with open_checkpoint(trainer_folder) as checkpoint:
        assert checkpoint.format == "hf-trainer"
        assert checkpoint.global_step == 500
        assert [s.scale for s in checkpoint.scalers] == [1024.0]
        roles = {(ref.role, ref.entry) for ref in checkpoint}
        assert {("weight", "bias"), ("moment", "exp_avg"), ("moment", "exp_avg_sq"), ("other", "step")} <= roles
        assert {s.what for s in checkpoint.skipped} == {"training_args.bin", "rng_state.pth", "scheduler.pt"}
        assert [f.path for f in checkpoint.files] == ["model.safetensors", "optimizer.pt", "scaler.pt"]
        assert checkpoint.errors == ()


def test_loading_a_trainers_folder_gives_what_a_run_needs(trainer_folder):
    loaded = load_state(trainer_folder)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    assert loaded.model is not None
    assert loaded.optimizer is not None
    model.load_state_dict(loaded.model)
    optimizer.load_state_dict(loaded.optimizer)
    assert loaded.scaler == SCALER
    assert loaded.global_step == 500
    assert len(optimizer.state) == 4


def test_safetensors_sorts_names_so_only_unique_shapes_name_a_moment(tmp_path):
    """Names that sort in another order than the modules: matching by order would put b's moments on a."""
    model = torch.nn.ModuleDict(
        {"b": torch.nn.Linear(4, 4), "a": torch.nn.Linear(4, 4), "c": torch.nn.Linear(4, 2, bias=False)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        named = {ref.name for ref in checkpoint if ref.entry == "exp_avg"}
    assert named == {"param 0", "param 1", "param 2", "param 3", "c.weight"}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read_through_their_index_or_their_folder(tmp_path, suffix):
    index = write_sharded(tmp_path / "m", suffix=suffix)
    for target, layout in ((index, "sharded"), (tmp_path / "m", "sharded")):
        with open_checkpoint(target) as checkpoint:
            assert checkpoint.format == layout
            assert {ref.name: float(ref.stored.load()[0]) for ref in checkpoint} == {
                "a.weight": 1,
                "a.bias": 1,
                "b.weight": 2,
            }
        model = load_state(target).model
        assert model is not None
        assert set(model) == {"a.weight", "a.bias", "b.weight"}


def test_a_missing_shard_makes_the_checkpoint_incomplete(tmp_path):
    write_sharded(tmp_path / "m")
    (tmp_path / "m" / "model-00002-of-00002.safetensors").unlink()
    with open_checkpoint(tmp_path / "m") as checkpoint:
        assert [(e.what, e.kind) for e in checkpoint.errors] == [("model-00002-of-00002.safetensors", "missing")]


def test_a_key_that_the_index_promises_and_the_shard_lacks_is_reported(tmp_path):
    index = write_sharded(tmp_path / "m")
    content = json.loads(index.read_text())
    content["weight_map"]["c.weight"] = "model-00002-of-00002.safetensors"
    del content["weight_map"]["a.bias"]
    index.write_text(json.dumps(content))
    with open_checkpoint(index) as checkpoint:
        assert [(e.kind, "c.weight" in e.message) for e in checkpoint.errors] == [("missing_keys", True)]
        assert "a.bias" in {ref.name for ref in checkpoint}


def test_a_shard_that_no_index_names_is_skipped_with_its_reason(tmp_path):
    write_sharded(tmp_path / "m")
    save_file({"old": torch.ones(1)}, tmp_path / "m" / "model-00003-of-00003.safetensors")
    with open_checkpoint(tmp_path / "m") as checkpoint:
        assert [s.what for s in checkpoint.skipped] == ["model-00003-of-00003.safetensors"]
        assert "old" not in {ref.name for ref in checkpoint}


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/m.safetensors",
        "a\\b",
        "C:x",
        "",
        ".",
        "..",
        "a\0b",
        "a\x1bb",
        "http://h/x",
        7,
        None,
    ],
)
def test_a_shard_name_that_leaves_the_folder_is_refused(tmp_path, name):
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    for target in (folder, folder / "model.safetensors.index.json"):
        with pytest.raises(CheckpointError, match="names"):
            open_checkpoint(target)


def test_the_hugging_face_cache_of_links_works(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    with open_checkpoint(snapshot) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["w"]


@pytest.mark.parametrize(
    "content",
    [{}, {"notes.txt": b"x"}, {"model.safetensors": b""}, {"a.pt": b"version https://git-lfs.github.com/spec/v1\n"}],
)
def test_a_folder_with_nothing_to_read_is_an_error(tmp_path, content):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_one_unreadable_file_beside_good_ones_is_an_error_of_the_report(trainer_folder):
    (trainer_folder / "optimizer.pt").write_bytes((trainer_folder / "optimizer.pt").read_bytes()[:-100])
    with open_checkpoint(trainer_folder) as checkpoint:
        assert [(e.what, e.kind) for e in checkpoint.errors] == [("optimizer.pt", "unreadable")]
        assert "truncated" in checkpoint.errors[0].message


def test_a_huge_json_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").touch()
    with (tmp_path / "model.safetensors.index.json").open("r+b") as file:
        file.write(b"{")
        file.truncate(65 * 1024 * 1024)
    with pytest.raises(LimitExceededError):
        open_checkpoint(tmp_path / "model.safetensors.index.json")


def test_two_training_checkpoints_in_a_folder_are_scanned_apart_and_never_loaded_as_one(tmp_path):
    for step in (1, 2):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, tmp_path / f"{step}.pt"
        )
    with open_checkpoint(tmp_path) as checkpoint:
        refs = {(ref.file, ref.name, ref.entry) for ref in checkpoint if ref.role in {"weight", "moment"}}
        assert len(checkpoint.optimizers()) == 2
    assert {(f"{n}.pt", "weight", "exp_avg") for n in (1, 2)} <= refs
    with pytest.raises(CheckpointError, match=r"2 models \(1\.pt, 2\.pt\)"):
        load_state(tmp_path)


def test_the_same_weights_in_two_formats_are_one_model(tmp_path):
    model = torch.nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict() | {"tied": model.weight.detach()}, tmp_path / "pytorch_model.bin")
    loaded = load_state(tmp_path).model
    assert loaded is not None
    assert torch.equal(loaded["weight"], model.weight)
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(list(checkpoint)) == 5


def test_a_file_of_another_format_beside_a_checkpoint_is_left_out_and_alone_refused(tmp_path):
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="bare pickle"):
        open_checkpoint(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(s.what, "bare pickle" in s.reason) for s in checkpoint.skipped] == [("vocab.pkl", True)]
        assert checkpoint.errors == ()
