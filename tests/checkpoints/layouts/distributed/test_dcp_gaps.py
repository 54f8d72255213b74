"""Distributed checkpoints in which something lies that the metadata do not tell of, or tell of twice."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError

FIXTURES = Path(__file__).parents[4] / "fixtures" / "checkpoints"
ONE, NAN = torch.ones(4), torch.full((4,), float("nan"))


def described(shape, chunks):
    pieces = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), pieces)


def tell(folder, entries, places):
    told = Metadata(state_dict_metadata=entries, planner_data=None, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    return folder


def write(folder, values):
    """A distributed checkpoint by one rank of tensors and objects under these flat names."""
    folder.mkdir()
    data, entries, places = b"", {}, {}
    for name, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        is_tensor = isinstance(value, torch.Tensor)
        at = torch.Size((0,) * value.dim()) if is_tensor else None
        entries[name] = described(value.shape, [(at, value.shape)]) if is_tensor else BytesStorageMetadata()
        places[MetadataIndex(name, at)] = _StorageInfo("__0_0.distcp", len(data), len(buffer.getvalue()))
        data += buffer.getvalue()
    (folder / "__0_0.distcp").write_bytes(data)
    return tell(folder, entries, places)


def broken_in(folder):
    """Names of the tensors that hold a NaN."""
    with open_checkpoint(folder) as checkpoint:
        return {
            f"{r.group}:{r.name}" for r in checkpoint if r.dtype.is_floating_point and r.stored.load().isnan().any()
        }


@pytest.mark.parametrize("inner", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_a_save_that_was_interrupted_is_incomplete(tmp_path, inner):
    saved = next((FIXTURES / "accelerate_fsdp2").rglob(inner)).parent
    folder = shutil.copytree(saved, tmp_path / "c")
    (folder / inner / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="missing: nothing says what lies in"):
        open_checkpoint(folder / inner)
    with open_checkpoint(folder) as checkpoint:
        (error,) = checkpoint.errors
        assert len(list(checkpoint)) > 0
    assert (error.what, error.kind) == (f"{inner}/.metadata", "missing")
    assert "interrupted" in error.message


def test_a_data_file_that_the_metadata_leave_out_is_remarked(tmp_path):
    folder = write(tmp_path / "c", {"w": ONE})
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.errors == ()
        assert checkpoint.remarks == (".metadata puts nothing into __1_0.distcp: not part of this checkpoint",)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer.state.w.exp_avg": ONE, "optimizer.state.exp_avg.w": NAN},
        {"optimizer.state.exp_avg.w": NAN, "optimizer.state.w.exp_avg": ONE},
    ],
)
def test_two_entries_of_one_place_in_an_optimizer_are_refused(tmp_path, values):
    with pytest.raises(CheckpointError, match="claims the place of another entry"):
        open_checkpoint(write(tmp_path / "c", {"w": ONE, **values}))


@pytest.mark.parametrize(
    "names",
    [
        ("optimizer.state.fp32_param.w", "optimizer.state.param.w"),
        ("optimizer.state.fp32_param.w", "chained_0.optimizer.state.fp32_param.w"),
        ("fp32.w", "optimizer.state.fp32_param.w"),
    ],
)
@pytest.mark.parametrize("sick", [0, 1])
def test_no_master_copy_hides_another(tmp_path, names, sick):
    copies = {name: NAN if number == sick else ONE for number, name in enumerate(names)}
    assert broken_in(write(tmp_path / "c", {"w": torch.ones(9), **copies}))
