"""DeepSpeed's folders whose files do not agree: nothing in one rank's file hides behind another's, and costs stay."""

from __future__ import annotations

import time

import pytest
import torch

from ampdoctor.checkpoints.folder import open_checkpoint

ONE, NAN = torch.ones(4), torch.full((4,), float("nan"))
FULL_NAN = torch.full((8,), float("nan"))
SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


def model(tensor, **more):
    shapes = [{"w": torch.Size([8])}]
    return {"module": {"w": tensor}, "buffer_names": [], "param_shapes": shapes, "dp_world_size": 2, **more}


def optimizer(state, master=ONE, **more):
    held = {
        "zero_stage": 1,
        "single_partition_of_fp32_groups": [master],
        "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "partition_count": [2],
    }
    return {"optimizer_state_dict": {**held, **more}}


def adam(first=ONE, second=ONE):
    return {"exp_avg": first, "exp_avg_sq": second, "step": 3}


def write(folder, ranks, main=None, **files):
    folder.mkdir()
    torch.save(model(torch.ones(8)) if main is None else main, folder / "mp_rank_00_model_states.pt")
    for rank, content in enumerate(ranks):
        torch.save(content, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    for name, content in files.items():
        torch.save(content, folder / f"{name}.pt")
    return folder


def broken_in(folder):
    """Files with a tensor that holds a NaN."""
    with open_checkpoint(folder) as checkpoint:
        return {ref.file for ref in checkpoint if ref.stored.load().isnan().any()}


HEALTHY = [optimizer(adam()), optimizer(adam())]
SECOND = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    "states",
    [
        ({}, adam(NAN, NAN)),
        ({"exp_avg": ONE}, adam(second=NAN)),
        (adam(torch.tensor(1.0)), adam(NAN)),
        (adam(), adam(torch.cat([ONE, *[NAN] * 50]))),
    ],
    ids=["empty", "fewer", "no-dimension", "longer"],
)
def test_state_of_ranks_that_differ_is_kept_as_it_lies(tmp_path, states):
    folder = write(tmp_path / "s", [optimizer(state) for state in states])
    assert broken_in(folder) == {SECOND}
    with open_checkpoint(folder) as checkpoint:
        assert "do not add up" in checkpoint.remarks[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("zero_pp_rank_1_mp_rank_00_model_states", model(FULL_NAN)),
        ("zero_pp_rank_0_mp_rank_00_model_states", model(FULL_NAN)),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states", optimizer(adam(NAN))),
        ("fp16_zero_pp_rank_1_mp_rank_00_optim_states", optimizer(adam(), NAN)),
        ("zero_pp_rank_1_mp_rank_0_optim_states", optimizer(adam(), NAN)),
    ],
)
def test_files_of_other_settings_are_refused_and_take_nothing_from_the_rest(tmp_path, name, content):
    with open_checkpoint(write(tmp_path / "s", HEALTHY, **{name: content})) as checkpoint:
        (error,) = checkpoint.errors
        assert "claims the rank of another file" in error.message
        assert sum((ref.role, ref.group, ref.name) == ("weight", "fp32", "w") for ref in checkpoint) == 1


def test_other_tensors_in_an_optimizer_s_file_are_read(tmp_path):
    assert broken_in(write(tmp_path / "s", [HEALTHY[0], {**HEALTHY[1], "ema": {"w": NAN}}])) == {SECOND}


@pytest.mark.parametrize(("scale", "scales"), [(65536.0, [65536.0]), (0.0, [65536.0, 0.0])])
def test_the_scaler_of_every_rank_counts(tmp_path, scale, scales):
    ranks = [optimizer(adam(), loss_scaler={**SCALER, "scale": value}) for value in (65536.0, scale)]
    with open_checkpoint(write(tmp_path / "s", ranks)) as checkpoint:
        assert [scaler.scale for scaler in checkpoint.scalers] == scales


@pytest.mark.parametrize("stage3", [False, True])
def test_sizes_that_no_tensor_has_take_no_time(tmp_path, stage3):
    shape = (3 * 2**45 + 1,) * 20_000
    main = model(torch.ones(8))
    main["param_shapes"] = [{f"w{n}": shape for n in range(12)}]
    ranks = HEALTHY
    if stage3:
        main |= {"param_shapes": [{"w": (2**47,) * 30}], "module": {"w": torch.empty(0)}}
        state = {"state": {0: adam()}, "param_groups": [{"params": [0]}]}
        held = {"zero_stage": 3, "fp32_flat_groups": [ONE], "optimizer_state_dict": state, "partition_count": 1}
        ranks = [{"optimizer_state_dict": held}]
    began = time.process_time()
    with open_checkpoint(write(tmp_path / "s", ranks, main)) as checkpoint:
        assert any("do not add up" in remark for remark in checkpoint.remarks)
    assert time.process_time() - began < 15


def test_many_scalers_in_a_rank_s_file_are_told_apart_in_little_time(tmp_path):
    scalers = {f"s{n}": {**SCALER, "scale": float(n + 1)} for n in range(5_000)}
    path = write(tmp_path / "s", [optimizer(adam()), optimizer(adam(), **scalers)])
    began = time.process_time()
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.scalers) == 5_000
    assert time.process_time() - began < 3
