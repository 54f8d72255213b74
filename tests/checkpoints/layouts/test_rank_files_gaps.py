"""Files that every rank wrote for itself: a broken tensor in any of them is seen, copies that others have included."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ampdoctor.checkpoints import open_checkpoint
from ampdoctor.checkpoints.stored_tensor import JoinedTensor

FIXTURES = Path(__file__).parents[3] / "fixtures" / "checkpoints"
FILES = sorted(FIXTURES.glob("fsdp*/checkpoint_0/*_rank[01].bin"))


def places(path: Path) -> list[tuple[str, int, int]]:
    """Where the floating-point tensors of a file lie: name, first byte, bytes."""
    with open_checkpoint(path) as checkpoint:
        floats = [ref.stored for ref in checkpoint if ref.dtype.is_floating_point and ref.shape and ref.stored.numel]
        assert not any(isinstance(stored, JoinedTensor) for stored in floats)
        blocks = [block for stored in floats for block in stored.blocks()]
        return sorted({(block.file.name, block.file.origin + block.offset, block.nbytes) for block in blocks})


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_broken_tensor_in_any_rank_s_file_is_seen(tmp_path, path):
    folder = shutil.copytree(path.parent, tmp_path / "c")
    found = places(folder / path.name)
    assert found
    for _, offset, count in found[:12]:
        descriptor = os.open(folder / path.name, os.O_RDWR)
        before = os.pread(descriptor, count, offset)
        os.pwrite(descriptor, b"\xff" * count, offset)
        with open_checkpoint(folder) as checkpoint:
            floats = [ref.stored for ref in checkpoint if ref.dtype.is_floating_point and ref.stored.numel]
            assert any(chunk.isnan().any() for stored in floats for chunk in stored.chunks()), (offset, count)
        os.pwrite(descriptor, before, offset)
        os.close(descriptor)
