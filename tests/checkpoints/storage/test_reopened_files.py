from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.checkpoints.files import ReopenedFile
from ampdoctor.errors import CheckpointError

DESCRIPTORS = Path("/proc/self/fd")


def descriptors():
    return len(list(DESCRIPTORS.iterdir()))


@pytest.fixture
def files(tmp_path):
    """Return twenty files; each holds its own number, many times."""
    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 5000)
    opened = [ReopenedFile(tmp_path / str(number), str(number)) for number in range(20)]
    yield opened
    for file in opened:
        file.close()


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="counts descriptors as Linux shows them")
def test_none_stays_open_and_all_can_be_read(files):
    before = descriptors()
    for _ in range(3):
        for number, file in enumerate(files):
            assert file.read(100, 3) == bytes([number]) * 3
            assert descriptors() == before


def test_one_that_changed_while_it_was_closed_is_refused(files, tmp_path):
    (tmp_path / "0").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="0 changed while it was being read"):
        files[0].read(0, 5)
    with pytest.raises(CheckpointError, match="changed"):
        files[0].require_unchanged()
    (tmp_path / "1").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        files[1].read(0, 5)
    assert files[2].read(0, 1) == b"\x02"


def test_one_that_was_closed_stays_closed(files):
    files[0].close()
    with pytest.raises(CheckpointError):
        files[0].read(0, 1)
