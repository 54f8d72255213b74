"""No tensor hides beside another part: what lies in the same dict as a model, an optimizer or a scaler is found."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import PurePosixPath

import pytest
import torch
from torch import nn

from ampdoctor.checkpoints.file_contents import FileContents
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.pickled_objects import MAX_DEPTH, Search, read_module
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.checkpoints.unpickler import PickledObject
from ampdoctor.errors import LimitExceededError
from ampdoctor.workflows.scan import scan

ONE = torch.ones(4)
BAD = torch.full((4,), float("nan"))
OPTIMIZER = {"param_groups": [{"params": [0], "lr": 1e-3}], "state": {0: {"exp_avg": ONE, "exp_avg_sq": ONE}}}
SCALER = {"scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}


def module(weight):
    owner = nn.Module()
    owner.w = nn.Parameter(weight.clone())
    return owner


def far_below(weight, name):
    owner = module(ONE)
    owner._modules[name] = module(weight)
    return owner


def stepped(moment):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"].copy_(moment)
    return {"model": model.state_dict(), "optimizer": optimizer}


CASES = {
    "modules in a dict beside a loss": lambda w: {"loss": torch.tensor(0.5), "nets": {"G": module(w)}},
    "modules in a list beside a tensor": lambda w: {"alpha": torch.ones(2), "models": [module(w)]},
    "a module beside a loss": lambda w: {"loss": torch.tensor(0.5), "model": module(w)},
    "a model in an optimizer's dict": lambda w: {**OPTIMIZER, "model": {"w": w}},
    "fp32 copies in an optimizer's dict": lambda w: {
        "optimizer": {**OPTIMIZER, "master_params": [w]},
        "model": {"w": ONE},
    },
    "a tensor in a scaler's dict": lambda w: {**SCALER, "w": w},
    "fp32 copies of more groups than there are": lambda w: {
        "model": {"w": ONE},
        "opt": {"optimizer": OPTIMIZER, "fp32_from_fp16": [[ONE], [w]]},
    },
    "a model below a random state": lambda w: {"w": ONE, "rng_state": {"model": {"w": w}}},
    "a model named like a random state": lambda w: {"model": {"w": ONE}, "rng_model": {"w": w}},
    "the first of two tuples as keys": lambda w: {"model": {("layer", 0): w, ("layer", 1): ONE}},
    "the first of two objects as keys": lambda w: {"model": {PurePosixPath("a"): w, PurePosixPath("b"): ONE}},
    "a number and its text as keys": lambda w: {"model": {1: w, "1": ONE}},
    "an optimizer that was pickled whole": stepped,
    "a child module whose name is all dots": lambda w: far_below(w, "." * 201),
}


@pytest.mark.parametrize("case", CASES)
def test_a_nan_is_found_wherever_it_was_saved(tmp_path, case):
    torch.save(CASES[case](BAD), tmp_path / "sick.pt")
    torch.save(CASES[case](ONE), tmp_path / "well.pt")
    assert scan(tmp_path / "sick.pt").verdict == "sick"
    well = scan(tmp_path / "well.pt")
    assert well.verdict == "healthy"
    assert not [finding for finding in well.findings if finding.severity != "note"]


def test_a_tensor_in_the_dict_of_a_scaler_or_of_a_group_is_seen_beside_a_model(tmp_path):
    grouped = {**OPTIMIZER, "param_groups": [{"params": [0], "lr": torch.tensor(1e-3), "d": BAD}]}
    torch.save({"model": {"w": ONE}, "scaler": {**SCALER, "w": BAD}, "optimizer": grouped}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert [s.scale for s in checkpoint.scalers] == [64.0]
        others = [ref.name for ref in checkpoint if ref.role == "other"]
    assert sorted(others) == ["optimizer.param_groups.0.d", "scaler.w"]


def test_the_moments_of_an_optimizer_that_was_pickled_whole_have_names(tmp_path):
    torch.save(stepped(ONE), tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        moments = {(ref.name, ref.entry) for ref in checkpoint if ref.role == "moment"}
    assert moments == {(name, entry) for name in ("weight", "bias") for entry in ("exp_avg", "exp_avg_sq")}


def test_a_moment_that_is_an_object_is_looked_into(tmp_path):
    state = {0: {"exp_avg": Namespace(codes=ONE, scale=BAD), "exp_avg_sq": ONE}}
    torch.save({"model": {"w": ONE}, "optimizer": {**OPTIMIZER, "state": state}}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        others = [ref.name for ref in checkpoint if ref.role == "other"]
    assert others == ["optimizer.state.0.exp_avg.codes", "optimizer.state.0.exp_avg.scale"]


def test_a_scalers_own_tensors_and_random_states_are_no_tensors_of_the_checkpoint(tmp_path):
    scaler = {**SCALER, "scale": torch.tensor([64.0]), "_growth_tracker": torch.tensor([5])}
    states = {"cpu": torch.get_rng_state(), "cuda": [torch.get_rng_state()]}
    torch.save({"model": {"w": ONE}, "scaler": scaler, "rng_state": states}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert [ref.name for ref in checkpoint] == ["w"]
        assert [s.scale for s in checkpoint.scalers] == [64.0]
        assert [(s.what, s.reason) for s in checkpoint.skipped] == [("rng_state", "random state")]


VIEWS = {
    "rows that share an element, with holes": ((2, 2, 2), (1, 1, 4)),
    "two strides that never meet": ((2, 2), (3, 2)),
    "windows over every third element": ((3, 4), (3, 6)),
    "windows over every element": ((5, 4), (1, 1)),
    "columns": ((4, 3), (1, 5)),
    "expanded": ((7, 3), (0, 2)),
}


@pytest.mark.parametrize(("shape", "stride"), VIEWS.values(), ids=VIEWS)
def test_a_scan_reads_what_a_view_touches_and_nothing_else(tmp_path, shape, stride):
    view = torch.arange(40.0).as_strided(shape, stride, 2)
    torch.save({"w": view}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        (ref,) = checkpoint
        read = torch.cat([chunk.clone() for chunk in ref.stored.chunks()]).tolist()
    assert set(read) == set(view.unique().tolist())
    assert len(read) <= view.numel()


def test_an_overlapping_view_with_holes_asks_for_bounded_work(tmp_path):
    torch.save({"w": torch.zeros(2_000_000).as_strided((2, 2, 900_000), (1, 1, 2))}, tmp_path / "dense.pt")
    torch.save({"w": torch.zeros(2_000_000).as_strided((2, 300_000, 5), (6, 6, 9))}, tmp_path / "holed.pt")
    for name in ("dense.pt", "holed.pt"):
        with open_checkpoint(tmp_path / name) as checkpoint:
            (ref,) = checkpoint
            assert sum(len(chunk) for chunk in ref.stored.chunks()) <= 2_000_000


def test_many_places_left_out_for_one_reason_are_counted(tmp_path):
    sparse = torch.zeros(2, 2).to_sparse()
    torch.save({"model": {"w": ONE}, "masks": [sparse] * 1000, "rng_state": torch.get_rng_state()}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        skipped = checkpoint.skipped
    assert len(skipped) == 22
    assert {s.what for s in skipped} > {"masks.0", "masks.19", "980 more", "rng_state"}


def test_a_type_whose_values_torch_cannot_compute_with_is_skipped(tmp_path):
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"w": ONE, "packed": packed}, tmp_path / "c.pt")
    report = scan(tmp_path / "c.pt")
    assert report.verdict == "healthy"
    assert [(s.what, s.reason) for s in report.skipped] == [
        ("packed", "dtype 'float4_e2m1fn_x2' is not one that is read")
    ]


def test_modules_too_deep_to_be_searched_are_named():
    inner = None
    for _ in range(300):
        children = {} if inner is None else {"m": inner}
        inner = PickledObject("Net", state={"_parameters": {}, "_buffers": {}, "_modules": children})
    content = read_module(inner, Search())
    assert [s.reason for s in content.skipped] == ["an object nested more deeply than a checkpoint's is not searched"]
    assert content.skipped[0].what == ".".join(["m"] * (MAX_DEPTH + 1))


class Optimizer:
    """Pickled as an object whose state is as a file likes it."""

    def __init__(self, state, groups):
        self.state, self.param_groups = state, groups


def test_an_optimizer_object_that_a_walk_would_not_come_to_the_end_of_is_searched_within_bounds(tmp_path):
    weight = nn.Parameter(torch.ones(1))
    endless: list[object] = [BAD]
    endless.append(endless)
    groups = [{"params": [weight]}]
    for state in ({"x": endless}, {"x": [[[BAD]]]}):
        torch.save({"model": {"w": ONE}, "o": Optimizer({weight: state}, groups)}, tmp_path / "c.pt")
        with open_checkpoint(tmp_path / "c.pt") as checkpoint:
            assert any(ref.role == "other" and ref.stored.load().isnan().all() for ref in checkpoint)


def test_thousands_of_keys_that_print_alike_are_counted_not_searched():
    sections = FileContents()
    began = time.process_time()
    places = [sections.place("model", ("k", n)) for n in range(20_000)]
    assert len(set(places)) == len(places)
    assert time.process_time() - began < 20  # counting from one each time takes hours


# -- pickles of a few kilobytes that ask for more work or memory than a machine has
#
# Seconds are those of the processor, with room for a slow machine: without its protection each takes minutes.


def doubled(levels, pair):
    node = pair(1, 2)
    for _ in range(levels):
        node = pair(node, node)
    return node


PAIRS = [
    lambda left, right: [left, right],
    lambda left, right: (left, right),
    lambda left, right: {"a": left, "b": right},
    lambda left, right: [{"a": left}, (right,)],
]


@pytest.mark.parametrize(
    ("pair", "place"), [*((pair, "extra") for pair in PAIRS), (PAIRS[0], "state"), (PAIRS[0], "root")]
)
def test_a_value_that_is_shared_at_every_level_is_refused_at_once(tmp_path, pair, place):
    bomb = doubled(60, pair)
    whole = {
        "extra": {"model": {"w": torch.ones(2)}, "x": bomb},
        "state": {"state": {0: {"exp_avg": bomb}}, "param_groups": [{"params": [0]}]},
        "root": bomb,
    }
    torch.save(whole[place], tmp_path / "c.pt")
    began = time.process_time()
    with pytest.raises(LimitExceededError, match="values"):
        load_state(tmp_path / "c.pt")
    assert time.process_time() - began < 25


def test_what_is_shared_a_few_times_is_read_at_each_place(tmp_path):
    state = {"w": torch.full((2,), 3.0)}
    torch.save({"model": state, "ema": state, "history": doubled(8, PAIRS[0])}, tmp_path / "c.pt")
    assert {name: float(model["w"][0]) for name, model in load_state(tmp_path / "c.pt").models.items()} == {
        "model": 3.0,
        "ema": 3.0,
    }


def test_sharing_does_not_hide_nesting(tmp_path):
    deep = []
    for _ in range(150):
        deep = [deep]
    chain = deep
    for _ in range(100):
        chain = [chain]
    torch.save({"model": {"w": torch.ones(2)}, "first": deep, "second": chain}, tmp_path / "c.pt")
    with pytest.raises(LimitExceededError, match="nesting"):
        open_checkpoint(tmp_path / "c.pt")


def test_a_large_value_below_many_levels_is_searched_once(tmp_path):
    plain = list(range(20_000))
    nest = {"z": torch.ones(2), "plain": plain}
    for _ in range(190):
        nest = {"n": nest, "plain": plain, "z": torch.ones(2)}
    torch.save(nest, tmp_path / "c.pt")
    began = time.process_time()
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert len(checkpoint) == 191
    assert time.process_time() - began < 75


class _Bytes:
    def __reduce__(self):
        return bytearray, (10**12,)


def test_memory_that_the_pickle_asks_for_is_not_given(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "x": _Bytes()}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert [ref.name for ref in checkpoint] == ["w"]
