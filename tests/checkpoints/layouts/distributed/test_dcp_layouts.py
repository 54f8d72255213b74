"""Every layout on top of torch.distributed.checkpoint, by the real libraries, against the truth told while saving."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ampdoctor.checkpoints.folder import open_checkpoint

FIXTURES = Path(__file__).parents[4] / "fixtures" / "checkpoints"
LAYOUTS = (
    "accelerate_fsdp2",
    "dcp_2d",
    "dcp_fsdp2",
    "dcp_safetensors",
    "dcp_single",
    "dcp_uneven",
    "lightning_fsdp",
    "megatron_dist",
    "torchtitan",
)
ARBITRARY = {
    "argparse.Namespace",
    "numpy._core.multiarray._reconstruct",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
}
"""What Lightning's hyper-parameters and Megatron's arguments and random states are made of."""
CASES = [
    pytest.param(layout, row, id=f"{layout}-{row['path']}")
    for layout in LAYOUTS
    for row in json.loads((FIXTURES / "expected" / f"{layout}.json").read_text())["checkpoints"]
    if not list((FIXTURES / layout / row["path"]).glob("latest*"))  # a run's folder, which only points to one
]


def told(row):
    return tuple(row["shape"]), row["dtype"], row["amax"], pytest.approx(row["sum"], rel=1e-9, abs=1e-12)


def seen(ref):
    whole = ref.stored.load().double()
    return ref.shape, str(ref.dtype).removeprefix("torch."), whole.abs().max().item(), whole.sum().item()


@pytest.mark.parametrize(("layout", "row"), CASES)
def test_tensors_scaler_and_step_are_those_of_the_live_objects(layout, row):
    with open_checkpoint(FIXTURES / layout / row["path"]) as checkpoint:
        refs = list(checkpoint)
        weights = {ref.name: seen(ref) for ref in refs if ref.role == "weight" and not ref.group}
        buffers = {ref.name: seen(ref) for ref in refs if ref.role == "buffer" and not ref.group}
        moments = {(ref.name, ref.entry): seen(ref) for ref in refs if ref.role == "moment"}
        steps = {(ref.name, ref.entry): seen(ref) for ref in refs if ref.role == "other" and ref.entry == "step"}
        assert weights == {name: told(fact) for name, fact in row["weights"].items()}
        assert buffers == {name: told(fact) for name, fact in row["buffers"].items()}
        wanted = {(fact["parameter"], fact["entry"]): told(fact) for fact in row["moments"]}
        assert {**moments, **steps} == wanted
        masters = {ref.name: seen(ref) for ref in refs if ref.group == "fp32"}
        assert masters == {name: told(fact) for name, fact in row.get("masters", {}).items()}
        assert checkpoint.errors == ()
        assert not set(checkpoint.unsafe_globals) - ARBITRARY
        if not row["scaler"] or row["scaler"]["growth_factor"] is not None:  # Megatron's own kind is no GradScaler
            found = [{key: getattr(scaler, key) for key in row["scaler"] or {}} for scaler in checkpoint.scalers]
            assert found == ([row["scaler"]] if row["scaler"] else [])
        if row["step"] is not None:
            assert checkpoint.global_step == row["step"]


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
