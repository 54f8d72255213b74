"""Megatron's distributed checkpoints: names, master weights, step.

Written here after the structure of Megatron's own writer (flat keys, no planner data, objects in lists, `common.pt`
beside them), because the library does not run without a GPU.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ampdoctor.checkpoints.dcp_names import sections_of
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.checkpoints.stored_tensor import StridedTensor
from ampdoctor.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WEIGHTS = {
    "embedding.word_embeddings.weight": torch.arange(8.0).reshape(4, 2).bfloat16(),
    "decoder.layers.self_attention.linear_qkv.weight": torch.ones(2, 6, 2).bfloat16(),
    "decoder.layers.mlp.experts.linear_fc1.weight": torch.full((2, 3, 2), 2.0).bfloat16(),
}
COMMON = {"args": Namespace(lr=1e-3), "checkpoint_version": 3.0, "iteration": 10}


def written(folder, *, chained=False, common=True, prefix=""):
    """Write `iter_0000010` below a folder, and what Megatron writes beside it."""
    target = folder / "iter_0000010"
    state = {f"{prefix}{name}": value for name, value in WEIGHTS.items()}
    for number, (name, value) in enumerate(state.copy().items()):
        owner = f"chained_{int('experts' in name)}.optimizer" if chained else "optimizer"
        for entry, factor in (("exp_avg", 0.5), ("exp_avg_sq", 0.25), ("fp32_param", 1.0)):
            state[f"{owner}.state.{entry}.{name}"] = value.float() * factor + number
    state["rng_state/shard_0_1"] = [{"random": (3, (1, 2), None), "torch": torch.zeros(5, dtype=torch.uint8)}]
    if not common:
        state["common_state/shard_0_1"] = [COMMON]
    dcp.save(state, checkpoint_id=target, no_dist=True, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    (target / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if common:
        torch.save(COMMON, target / "common.pt")
    return target


@pytest.mark.parametrize(("chained", "prefix", "common"), [(False, "", True), (True, "module.", False)])
def test_weights_moments_masters_and_step(tmp_path, chained, prefix, common):
    with open_checkpoint(written(tmp_path, chained=chained, common=common, prefix=prefix)) as checkpoint:
        refs = list(checkpoint)
        main = {ref.name: ref.dtype for ref in refs if ref.role == "weight" and not ref.group}
        assert main == dict.fromkeys(WEIGHTS, torch.bfloat16)
        assert {(ref.name, ref.entry) for ref in refs if ref.role == "moment"} == {
            (name, entry) for name in WEIGHTS for entry in ("exp_avg", "exp_avg_sq")
        }
        assert {ref.name: ref.dtype for ref in refs if ref.group == "fp32"} == dict.fromkeys(WEIGHTS, torch.float32)
        assert checkpoint.global_step == 10
        assert checkpoint.errors == ()


def test_buffers_that_hold_many_parameters(tmp_path):
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    state = {**WEIGHTS, **{f"{bucket}.{entry}": torch.ones(5) for entry in ("param", "exp_avg", "exp_avg_sq")}}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with open_checkpoint(tmp_path / "c") as checkpoint:
        moments = {(ref.name, ref.entry) for ref in checkpoint if ref.role == "moment"}
        master_weights = [ref.name for ref in checkpoint if ref.group]
    assert moments == {(bucket.removeprefix("optimizer."), entry) for entry in ("exp_avg", "exp_avg_sq")}
    assert master_weights == [bucket.removeprefix("optimizer.")]


def test_a_weight_may_be_called_state(tmp_path):
    model = {"state.proj.weight": torch.ones(2), "state.norm.weight": torch.ones(2)}
    dcp.save(model, checkpoint_id=tmp_path / "c", no_dist=True)
    assert set(load_state(tmp_path / "c").model) == set(model)


def test_flattened_optimizers_become_groups_of_equal_settings(tmp_path):
    optimizer = {}
    for name, decay in (("a.weight", 0.1), ("b.weight", 0.1), ("a.bias", 0.0)):
        optimizer[f"state.{name}.exp_avg"] = torch.ones(2)
        optimizer[f"param_groups.{name}.weight_decay"] = decay
        optimizer[f"param_groups.{name}.betas"] = (0.9, 0.95)
    model = {name: torch.ones(2) for name in ("a.weight", "a.bias", "b.weight")}
    dcp.save({**model, "optimizer": optimizer}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert load_state(tmp_path / "c").optimizer["param_groups"] == [
        {"weight_decay": 0.1, "betas": (0.9, 0.95), "params": ["a.weight", "b.weight"]},
        {"weight_decay": 0.0, "betas": (0.9, 0.95), "params": ["a.bias"]},
    ]


def test_slices_in_safetensors_are_refused(tmp_path):
    name = "shard-00001-model-00001-of-00001.safetensors"
    written_by = {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0]}}'}
    for one in (name, "model-00001-of-00001.safetensors"):  # the same writer's whole tensors
        save_file({"w": torch.ones(2)}, tmp_path / one, metadata=written_by)
    with open_checkpoint(tmp_path / "model-00001-of-00001.safetensors") as checkpoint:
        assert len(checkpoint) == 1
    with pytest.raises(CheckpointError, match=f"{name} holds slices of tensors"):
        open_checkpoint(tmp_path / name)


def test_master_copies_of_many_weights_are_taken_in_little_time():
    unread = StridedTensor(file=None, offset=0, storage_bytes=200, dtype=torch.float32, shape=(50,), stride=(1,))
    values = {f"optimizer.state.fp32_param.w{n}": unread for n in range(60_000)}
    began = time.process_time()
    sections = sections_of(values, {}, (), "c")
    assert time.process_time() - began < 4
    assert len(sections.models["fp32"]) == 60_000
