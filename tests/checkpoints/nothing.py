"""A stored tensor for tests that read none: whoever reads it fails."""

from __future__ import annotations

import torch

from ampdoctor.checkpoints.files import ByteSource
from ampdoctor.checkpoints.stored_tensor import StridedTensor


class Nothing(ByteSource):
    """A file that must not be read."""

    name, size, origin = "nothing", 0, 0

    def read_into(self, offset: int, target: memoryview) -> None:
        raise AssertionError


NOTHING = StridedTensor(file=Nothing(), offset=0, storage_bytes=200, dtype=torch.float32, shape=(50,), stride=(1,))
