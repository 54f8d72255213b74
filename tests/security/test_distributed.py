"""Checkpoints of many files: what names them may lie about where they are (S15), and how many there should be."""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.dcp_metadata import MAX_METADATA_BYTES
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError, LimitExceededError
from tests.security import hostile as h

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"


@pytest.fixture
def distributed(tmp_path):
    """A folder with a small distributed checkpoint; beside the folder lies a copy of its data."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name, content in h.distributed().items():
        (folder / name).write_bytes(content)
    (tmp_path / "secret.distcp").write_bytes((folder / h.FIRST_SHARD).read_bytes())
    return folder


def rewritten(folder, **changes):
    """Change the place of the weight in the metadata."""
    told = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in told.storage_data.items():
        if index.fqn == "model.w":
            told.storage_data[index] = dataclasses.replace(info, **changes)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    return folder


@pytest.mark.parametrize("path", ["../secret.distcp", "{}/secret.distcp", "C:secret.distcp", "x:y", "..", "a\\b"])
def test_data_are_read_beside_their_metadata_only(distributed, tmp_path, path):
    """S15: torch joins the path to the folder unseen, and reads what lies there."""
    rewritten(distributed, relative_path=path.format(tmp_path))
    with pytest.raises(CheckpointError, match="not a plain file name; refused"):
        open_checkpoint(distributed)


@pytest.mark.parametrize("changes", [{"offset": 10**12}, {"offset": 10**12, "length": 2**60}])
def test_a_place_past_the_end_is_an_error_and_no_number(distributed, changes):
    with open_checkpoint(rewritten(distributed, **changes)) as checkpoint:
        assert "w" not in {ref.name for ref in checkpoint}
        assert [note.kind for note in checkpoint.errors] == ["truncated"]


def test_two_entries_of_the_same_bytes_are_refused(distributed):
    """One record would be shown as two tensors, and what lies in the place of the second as nothing."""
    places = pickle.loads((distributed / ".metadata").read_bytes()).storage_data
    other = next(info for index, info in places.items() if index.fqn == "model.n")
    with pytest.raises(CheckpointError, match="share bytes"):
        open_checkpoint(rewritten(distributed, offset=other.offset, length=other.length))


def test_metadata_larger_than_any_run_has_are_refused_unread(distributed):
    os.truncate(distributed / ".metadata", MAX_METADATA_BYTES + 1)
    with pytest.raises(LimitExceededError, match="bytes") as caught:
        open_checkpoint(distributed)
    assert (caught.value.limit, caught.value.actual) == (MAX_METADATA_BYTES, MAX_METADATA_BYTES + 1)


@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt"])
@pytest.mark.parametrize("text", ["../step5", "{}/step5", "..", ".", "C:step5", "a/../../step5", "x\0", "a\\b"])
def test_a_pointer_names_a_folder_beside_itself_only(tmp_path, pointer, text):
    """S14 for folders: DeepSpeed and Megatron join the text of the file to its folder."""
    run, outside = tmp_path / "run", tmp_path / "step5"
    for folder in (run, outside):
        folder.mkdir()
    save_file({"w": torch.ones(2)}, outside / "model.safetensors")
    (run / pointer).write_text(text.format(tmp_path))
    with pytest.raises(CheckpointError, match=f"{pointer} names the folder .* not a plain file name; refused"):
        open_checkpoint(run)


def test_a_pointer_as_long_as_a_file_is_no_name(tmp_path):
    (tmp_path / "latest").write_bytes(b"")
    os.truncate(tmp_path / "latest", 1 << 40)
    with pytest.raises(CheckpointError, match="which is no folder's name"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("claim", [65_537, 10**9, 2**62, -1, True, 1.5, "9", [10**9] * 1000])
def test_deepspeeds_count_of_ranks_is_believed_within_reason(tmp_path, claim):
    """Each missing rank is looked for; a file of a kilobyte could ask for 2^62 of them."""
    optimizer = {
        "base_optimizer_state": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"params": [0]}]},
        "single_partition_of_fp32_groups": [torch.ones(4)],
        "zero_stage": 2,
        "partition_count": claim,
    }
    model = {"module": {"w": torch.ones(4)}, "param_shapes": [{"w": torch.Size([4])}], "dp_world_size": claim}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": optimizer}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    began = time.process_time()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.errors == ()
        assert "w" in {ref.name for ref in checkpoint}
    assert time.process_time() - began < 20
