"""DeepSpeed's folders beyond those that are kept: missing ranks, odd partitions, scalers, pointers, odd files."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError

FIXTURES = Path(__file__).parents[3] / "fixtures" / "checkpoints"
SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (3, 5), "b.bias": (3,)}


def values(offset=0.0):
    """A tensor for each parameter in which every element is its own number."""
    numbers = torch.arange(38.0) + offset
    parts = numbers.split([15, 5, 15, 3])
    return {name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def flatten(named, order, ranks):
    """One partition for each rank, as stage_1_and_2.py lays them out, the last ones' padding cut off."""
    flat = torch.cat([named[name].flatten() for name in order])
    size = 2 * -(-flat.numel() // (2 * ranks))
    return [flat[rank * size : (rank + 1) * size] for rank in range(ranks)]


def write_zero2(folder, *, ranks=3, **options):
    """A folder of ZeRO 2 with one group, after DeepSpeed 0.19.8's source.

    Options: `order` of the parameters in the flat group, `elastic`, `padded` moments, `config`,
    `scaler`, `counts`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = options.get("order", list(SHAPES))
    master_weights, firsts = flatten(values(), order, ranks), flatten(values(100.0), order, ranks)
    model = {
        "module": {name: tensor.half() for name, tensor in values().items()},
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(SHAPES[name]) for name in order}],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": ranks,
        "ds_config": {"zero_optimization": {"stage": 2, **options.get("config", {})}},
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        first = firsts[rank]
        if options.get("padded"):
            first = torch.cat([first, torch.full((master_weights[0].numel() - first.numel(),), float("nan"))])
        state = {"step": torch.tensor(7.0), "exp_avg": first}
        base = (
            [state] if options.get("elastic") else {"state": {0: state}, "param_groups": [{"lr": 0.5, "params": [0]}]}
        )
        optimizer = {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [master_weights[rank]],
            "zero_stage": 2,
            "partition_count": options.get("counts", [ranks]),
            "param_alignment_paddings": [[0 for _ in order]],
        }
        if "scaler" in options:
            optimizer["loss_scaler"] = options["scaler"]
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def found(path, role, group, entry=None):
    with open_checkpoint(path) as checkpoint:
        return {
            ref.name: ref.stored.load()
            for ref in checkpoint
            if (ref.role, ref.group) == (role, group) and entry in {None, ref.entry}
        }


def same(got, wanted):
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize(
    "options",
    [{}, {"elastic": True}, {"padded": True}, {"order": ["b.bias", "a.weight", "b.weight", "a.bias"]}],
    ids=["plain", "elastic", "padded", "order"],
)
def test_partitions_give_each_parameter_its_own_elements(tmp_path, ranks, options):
    folder = write_zero2(tmp_path / "global_step7", ranks=ranks, **options)
    assert same(found(folder, "weight", "fp32"), values())
    assert same(found(folder, "moment", "", "exp_avg"), values(100.0))
    with open_checkpoint(folder) as checkpoint:
        assert (checkpoint.errors, checkpoint.remarks) == ((), ())
        assert checkpoint.global_step == 7
        assert checkpoint.format == "deepspeed"


@pytest.mark.parametrize(
    "options",
    [{"counts": [1]}, {"order": list(SHAPES)[:3]}, {"config": {"round_robin_gradients": True}}],
    ids=["experts", "shorter", "dealt-out"],
)
def test_what_does_not_add_up_keeps_the_names_of_ranks_and_is_not_loaded(tmp_path, options):
    folder = write_zero2(tmp_path / "s", ranks=3, **options)
    if len(options.get("order", SHAPES)) < len(SHAPES):
        path = folder / "mp_rank_00_model_states.pt"
        model = torch.load(path)
        model["param_shapes"][0] = {name: torch.Size([*shape, 2]) for name, shape in SHAPES.items()}
        torch.save(model, path)
    names = {f"rank {rank} group 0" for rank in range(3)}
    assert found(folder, "weight", "fp32").keys() == names
    assert found(folder, "moment", "", "exp_avg").keys() == names
    assert found(folder, "weight", "").keys() == SHAPES.keys()
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.errors == ()
        assert "do not add up" in checkpoint.remarks[0]
    loaded = load_state(folder)
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(loaded.optimizer or {})


def as_deepspeed(monkeypatch, name, fields):
    """An object that pickles under the name of DeepSpeed's class."""
    module = ModuleType("deepspeed.runtime.fp16.loss_scaler")
    kind = type(name, (), {"__module__": module.__name__})
    setattr(module, name, kind)
    for parent in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        monkeypatch.setitem(__import__("sys").modules, parent, ModuleType(parent))
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    scaler = kind()
    scaler.__dict__.update(fields)
    return scaler


@pytest.mark.parametrize(
    ("now", "last", "tracker"), [(1, -1, 0), (4, -1, 3), (5, -1, 0), (8, 7, 0), (11, 7, 2), (13, 7, 0)]
)
def test_a_dynamic_scaler_counts_its_clean_steps(tmp_path, monkeypatch, now, last, tracker):
    fields = {"cur_scale": 512.0, "dynamic": True, "cur_iter": now, "last_overflow_iter": last, "scale_factor": 4.0,
              "scale_window": 4, "min_scale": 2.0, "delayed_shift": 1}  # fmt: skip
    folder = write_zero2(tmp_path / "s", scaler=as_deepspeed(monkeypatch, "DynamicLossScaler", fields))
    with open_checkpoint(folder) as checkpoint:
        (scaler,) = checkpoint.scalers
    assert (scaler.scale, scaler.growth_factor, scaler.backoff_factor) == (512.0, 4.0, 0.25)
    assert (scaler.growth_interval, scaler.growth_tracker, scaler.min_scale) == (4, tracker, 2.0)


@pytest.mark.parametrize(("scale", "scales"), [(1.0, []), (128.0, [128.0])])
def test_a_static_scale_counts_where_it_scales(tmp_path, monkeypatch, scale, scales):
    static = as_deepspeed(monkeypatch, "LossScaler", {"cur_scale": scale, "dynamic": False})
    folder = write_zero2(tmp_path / "s", scaler=static)
    with open_checkpoint(folder) as checkpoint:
        assert [s.scale for s in checkpoint.scalers] == scales
        assert {(s.growth_factor, s.backoff_factor) for s in checkpoint.scalers} <= {(1.0, 1.0)}


@pytest.mark.parametrize("layout", ["deepspeed_zero1", "deepspeed_zero3"])
def test_a_missing_rank_makes_the_checkpoint_incomplete(tmp_path, layout):
    folder = tmp_path / "global_step4"
    shutil.copytree(FIXTURES / layout / "global_step4", folder)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with open_checkpoint(folder) as checkpoint:
        (error,) = checkpoint.errors
        assert error.kind == "missing"
        assert "rank 1" in error.message
        names = {ref.name for ref in checkpoint if ref.role == "moment"}
        assert names
        assert all(name.startswith("rank 0 group ") for name in names)


def test_a_missing_model_file_leaves_the_partitions_without_names(tmp_path):
    folder = write_zero2(tmp_path / "s", ranks=2)
    (folder / "mp_rank_00_model_states.pt").unlink()
    with open_checkpoint(folder) as checkpoint:
        assert [error.what for error in checkpoint.errors] == ["mp_rank_00_model_states.pt"]
        assert {ref.name for ref in checkpoint} == {"rank 0 group 0", "rank 1 group 0"}


@pytest.mark.parametrize(("text", "sentence"), [("gone", "not there"), ("x" * 300, "no folder's name")])
def test_a_pointer_leads_nowhere_but_to_a_folder_beside_it(tmp_path, text, sentence):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text(text)
    write_zero2(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(tmp_path / "run")


def test_the_trainers_folder_of_a_deepspeed_run_is_read_whole(tmp_path):
    write_zero2(tmp_path / "global_step7")
    (tmp_path / "latest").write_text("global_step7\n")
    torch.save({name: tensor.half() for name, tensor in values().items()}, tmp_path / "pytorch_model.bin")
    log = {"global_step": 7, "log_history": [{"step": 7, "loss": 1.0}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(log))
    with open_checkpoint(tmp_path) as checkpoint:
        assert {f.path for f in checkpoint.files} >= {"pytorch_model.bin", "global_step7/mp_rank_00_model_states.pt"}
        assert list(checkpoint.models()) == [""]
    shutil.rmtree(tmp_path / "global_step7")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.errors == ()
        assert "global_step7, which is not there" in checkpoint.remarks[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"param_shapes": 3},
        {"param_shapes": [{"a.weight": "no shape"}]},
        {"param_shapes": [{"a.weight": (-1, 5)}]},
        {"dp_world_size": 10**12},
        {"module": None},
        {"buffer_names": 7},
        {"shared_params": {"x": ["y"]}},
        {"ds_config": None},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_model_file_that_lies_breaks_nothing(tmp_path, damage):
    folder = write_zero2(tmp_path / "s")
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path), **damage}, path)
    with open_checkpoint(folder) as checkpoint:
        assert any(ref.role == "moment" for ref in checkpoint)


# -- files that do not agree: nothing in one rank's file hides behind another's, and costs stay

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
