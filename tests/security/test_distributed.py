"""Checkpoints of many files: what names them may lie about where they are (S15), and how many there should be."""

from __future__ import annotations

import os
import time

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.dcp import MAX_METADATA_BYTES
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError, LimitExceededError


def test_metadata_larger_than_any_run_has_are_refused_unread(tmp_path):
    (tmp_path / ".metadata").touch()
    os.truncate(tmp_path / ".metadata", MAX_METADATA_BYTES + 1)
    with pytest.raises(LimitExceededError, match=f"{MAX_METADATA_BYTES + 1} is beyond the limit"):
        open_checkpoint(tmp_path)


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
