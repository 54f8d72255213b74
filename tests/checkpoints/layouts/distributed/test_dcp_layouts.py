"""Every layout on top of torch.distributed.checkpoint, by the real libraries, against what torch loads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ampdoctor.checkpoints.folder import open_checkpoint

FIXTURES = Path(__file__).parents[4] / "fixtures" / "checkpoints"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("folder", sorted({p.parent for p in FIXTURES.rglob(".metadata")}), ids=lambda p: p.name)
def test_every_tensor_is_what_torch_loads(folder):
    truth = {}
    _load_state_dict(truth, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    kept = {name: value for name, value in truth.items() if not name.startswith("rng_state")}  # told as left out
    with open_checkpoint(folder) as checkpoint:
        own = Counter(fingerprint(ref.stored.load()) for ref in checkpoint if ref.file.endswith(".distcp"))
    assert own == Counter(fingerprint(value) for value in leaves(kept))


def leaves(node):
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from leaves(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from leaves(value)


def fingerprint(tensor):
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
