"""Files that change while they are read: S17. A mapped file that shrinks kills the process with SIGBUS (measured)."""

from __future__ import annotations

import os
import time

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError
from ampdoctor.workflows.scan import scan


def written(path, form):
    state = {f"w{i}": torch.ones(1 << 18) for i in range(16)}
    if form == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")


def shrink(path):
    os.truncate(path, 5000)


def rewrite(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 4096)


def grow(path):
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("form", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("change", [shrink, rewrite, grow])
def test_a_file_that_changes_during_a_scan_is_an_error_and_never_a_report(form, change, tmp_path):
    path = tmp_path / "c"
    written(path, form)
    time.sleep(0.02)  # the system's clock of files ticks a hundred times a second
    done = []

    def progress(_what, bytes_done, _total, **_unit):
        if bytes_done and not done:
            done.append(True)
            change(path)

    with pytest.raises(CheckpointError, match="changed while it was being read"):
        scan(path, progress=progress)
    assert done


def test_a_file_that_is_replaced_stays_the_one_that_was_opened(tmp_path):
    path = tmp_path / "c.safetensors"
    save_file({"w": torch.ones(4)}, path)
    with open_checkpoint(path) as checkpoint:
        save_file({"w": torch.zeros(4)}, tmp_path / "new")
        (tmp_path / "new").rename(path)
        assert next(iter(checkpoint)).stored.load().tolist() == [1.0] * 4
