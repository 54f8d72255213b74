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


def write_sharded(folder: Path) -> Path:
    folder.mkdir()
    table = {}
    for number, names in enumerate((("a.weight", "a.bias"), ("b.weight",)), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: torch.full((3,), float(number)) for name in names}, folder / shard)
        table.update(dict.fromkeys(names, shard))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": table}))
    return index


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


def test_one_unreadable_file_beside_good_ones_is_an_error_of_the_report(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    (tmp_path / "optimizer.pt").write_bytes((tmp_path / "optimizer.pt").read_bytes()[:-100])
    with open_checkpoint(tmp_path) as checkpoint:
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
