"""What every source of bytes must bring."""

from __future__ import annotations

import pytest

from ampdoctor.checkpoints.files import ByteSource


def test_a_source_of_bytes_that_cannot_be_read_cannot_be_made():
    class Mute(ByteSource):
        pass

    with pytest.raises(TypeError, match="read_into"):
        Mute()
