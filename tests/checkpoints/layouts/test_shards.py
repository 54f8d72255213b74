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


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ([name_of(1), name_of(2), name_of(3)], []),
        ([name_of(0), name_of(1), name_of(2)], []),
        ([name_of(2), name_of(3)], [name_of(1)]),
        ([name_of(1), name_of(2)], [name_of(3)]),
        ([name_of(1, 999_999)], [name_of(2, 999_999)]),  # a number that lies costs nothing
    ],
)
def test_shards_without_an_index_are_one_model_and_a_missing_one_is_noted(tmp_path, names, missing):
    write(tmp_path, {name: [f"layer{n}.w"] for n, name in enumerate(names)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(error.kind, error.what) for error in checkpoint.errors] == [("missing", name) for name in missing]
    assert load_state(tmp_path).model.keys() == {f"layer{n}.w" for n in range(len(names))}


def test_a_tensor_in_another_shard_than_the_index_says_is_there(tmp_path):
    write(
        tmp_path,
        {name_of(1, 2): ["a.w"], name_of(2, 2): ["b.w"]},
        {"a.w": name_of(2, 2), "b.w": name_of(2, 2), "c.w": name_of(1, 2)},
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(error.kind, "'c.w'" in error.message) for error in checkpoint.errors] == [("missing_keys", True)]
