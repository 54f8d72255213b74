"""Shards that are missing, twice there, or elsewhere than their index says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, shards: dict[str, list[str]], index: dict[str, str] | None = None) -> Path:
    for shard, names in shards.items():
        save_file({name: torch.full((2,), float(len(name))) for name in names}, folder / shard)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def name_of(number: int, total: int = 3) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def test_shards_without_an_index_are_one_model(tmp_path):
    write(tmp_path, {name_of(1): ["a.w"], name_of(2): ["b.w"], name_of(3): ["c.w"]})
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.errors, checkpoint.remarks) == ((), ())
        assert [ref.name for ref in checkpoint] == ["a.w", "b.w", "c.w"]
    assert load_state(tmp_path).model.keys() == {"a.w", "b.w", "c.w"}


@pytest.mark.parametrize("absent", [1, 2, 3])
def test_a_missing_shard_is_noted_without_an_index_as_well(tmp_path, absent):
    write(tmp_path, {name_of(n): [f"layer{n}.w"] for n in (1, 2, 3) if n != absent})
    with open_checkpoint(tmp_path) as checkpoint:
        (error,) = checkpoint.errors
        assert (error.kind, error.what) == ("missing", name_of(absent))
        assert "2 of 3 shards" in error.message


def test_shards_that_are_numbered_from_zero_are_all_there(tmp_path):
    write(tmp_path, {name_of(n): [f"layer{n}.w"] for n in (0, 1, 2)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.errors == ()


def test_a_number_that_lies_costs_nothing(tmp_path):
    write(tmp_path, {"model-00001-of-999999.safetensors": ["a.w"]})
    with open_checkpoint(tmp_path) as checkpoint:
        assert [error.what for error in checkpoint.errors] == ["model-00002-of-999999.safetensors"]


def test_a_tensor_in_another_shard_than_the_index_says_is_there(tmp_path):
    write(
        tmp_path,
        {name_of(1, 2): ["a.w"], name_of(2, 2): ["b.w"]},
        {"a.w": name_of(2, 2), "b.w": name_of(2, 2), "c.w": name_of(1, 2)},
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(error.kind, "'c.w'" in error.message) for error in checkpoint.errors] == [("missing_keys", True)]
