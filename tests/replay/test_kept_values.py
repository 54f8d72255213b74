"""What tensors held comes back bit by bit, from memory and from a file, and is kept once while it stays the same."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.errors import ReplayError
from ampdoctor.replay import tensor_store
from ampdoctor.replay.session import Session
from ampdoctor.replay.tensor_store import SMALL, TensorStore
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

BIG = SMALL // 4 + 3  # float32 elements: more bytes than stay in memory, and no whole number of words


def special(dtype):
    values = torch.randn(BIG).to(dtype)
    values[:4] = torch.tensor([0.0, -0.0, float("nan"), 1e-7]).to(dtype)
    return values


TENSORS = {
    "float32": lambda: special(torch.float32),
    "float16": lambda: special(torch.float16).repeat(3),
    "complex": lambda: torch.randn(BIG, dtype=torch.complex64),
    "channels_last": lambda: torch.randn(4, 8, 24, 32).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(160, 130).t(),
    "gaps": lambda: torch.randn(200, 300)[:, ::2],
    "small": lambda: torch.randn(3),
    "shown_often": lambda: torch.tensor([2.5]).expand(1),
    "empty": lambda: torch.empty(0, 4),
}


def as_bytes(values):
    return values.contiguous().view(-1).view(torch.uint8).tolist() if values.numel() else []


@pytest.mark.parametrize("spilled", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("name", TENSORS)
def test_values_come_back_bit_by_bit(name, spilled, tmp_path):
    tensor = TENSORS[name]()
    before = as_bytes(tensor)
    keeper = TensorStore(tmp_path if spilled else None)
    first, kept = keeper.keep(torch.ones(BIG)), keeper.keep(tensor)
    if name != "gaps":
        assert kept.are_in(tensor) or not tensor.is_contiguous()
        assert keeper.keep(tensor, kept) is kept or not tensor.is_contiguous()
    tensor.zero_()
    if tensor.numel():
        assert not kept.are_in(tensor)
        assert keeper.keep(tensor, kept) is not kept
    for _ in range(2):
        kept.copy_to(tensor.fill_(1))
        assert as_bytes(tensor) == before
    assert first.are_in(torch.ones(BIG))
    assert not first.are_in(torch.ones(BIG, dtype=torch.float64))


def test_bits_are_compared_and_not_numbers():
    zeros = torch.zeros(4)
    kept = TensorStore().keep(zeros)
    assert not kept.are_in(-zeros)
    nan = torch.full((4,), float("nan"))
    assert TensorStore().keep(nan).are_in(nan.clone())


def test_what_is_no_plain_memory_is_copied_each_time(tmp_path):
    tensor, keeper = torch.eye(SMALL // 8).to_sparse(), TensorStore(tmp_path)
    kept = keeper.keep(tensor)
    assert not any(str(tmp_path) in line for line in mapped())
    assert keeper.keep(tensor, kept) is not kept


def test_one_bit_far_behind_is_seen(tmp_path):
    values = torch.zeros(3 * 2**20)
    kept = TensorStore(tmp_path).keep(values)
    values[-2] = 1e-45
    assert not kept.are_in(values)


def mapped():
    """Returns the deleted files that this process has mapped into its memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(" (deleted)")]


def test_large_tensors_go_to_a_file_that_has_no_name_and_is_gone_with_them(tmp_path):
    keeper = TensorStore(tmp_path)
    big, small = keeper.keep(torch.ones(BIG)), keeper.keep(torch.ones(4))
    (line,) = [line for line in mapped() if str(tmp_path) in line]
    assert int(line.split("-")[0], 16) == big.values.data_ptr() != small.values.data_ptr()
    assert list(tmp_path.iterdir()) == []
    assert big.are_in(torch.ones(BIG))
    sizes = Path("/proc/self/smaps").read_text().split(line)[1]
    assert re.search(r"^Rss: +(\d+) kB$", sizes, re.MULTILINE)[1] == "0", "it takes no memory between two uses"
    del big
    gc.collect()
    assert [line for line in mapped() if str(tmp_path) in line] == []


def big_run(*, frozen=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 160))
    model[0].requires_grad_(not frozen)
    return TrainingRun(
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        loss=lambda net, batch: net(batch).square().mean(),
        batches=[torch.randn(4, 160) for _ in range(4)],
        precision="fp16",
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )


def values_of(snapshot):
    return list(snapshot._values.values())


def test_a_snapshot_shares_what_is_as_in_the_first_one():
    session = Session(big_run(frozen=True), device=torch.device("cpu"))
    first = session.snapshot()
    session.has_step(0)
    session.step(0)
    second = session.snapshot()
    shared = [one for one in values_of(second) if any(one is other for other in values_of(first))]
    assert len(shared) == 2, "the frozen weight and bias"
    again = session.snapshot()
    assert len([one for one in values_of(again) if any(one is other for other in values_of(second))]) == 2
    session.close()


def test_optimizer_state_comes_back_in_its_own_memory(tmp_path):
    session = Session(big_run(), device=torch.device("cpu"), spill=tmp_path)
    session.has_step(3)
    session.step(0)
    (optimizer,) = session.optimizers.values()
    weight = session.model[0].weight
    moment = optimizer.state[weight]["exp_avg"]
    place, bits = moment.data_ptr(), as_bytes(moment)
    snapshot = session.snapshot()
    session.step(1)
    assert as_bytes(moment) != bits
    snapshot.restore()
    assert optimizer.state[weight]["exp_avg"] is moment
    assert (moment.data_ptr(), as_bytes(moment)) == (place, bits)
    optimizer.state[weight]["exp_avg"] = torch.zeros(3)  # an optimizer that makes a new one each step
    del moment
    snapshot.restore()
    assert as_bytes(optimizer.state[weight]["exp_avg"]) == bits
    session.close()


def test_a_spilled_diagnosis_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_store.tempfile, "tempdir", str(tmp_path))
    made = []
    monkeypatch.setattr(
        tensor_store, "_in_file", lambda *asked, own=tensor_store._in_file: made.append(1) or own(*asked)
    )
    here, there = (bisect_nan(ReplayRequest(factory=big_run, steps=4, spill=spill)) for spill in (False, True))
    assert here == there
    assert made
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_no_room_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_store.tempfile, "tempdir", str(tmp_path))
    run = big_run()
    weight = run.model[0].weight.detach().clone()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, limits[1]))
    try:
        with pytest.raises(ReplayError, match=rf"cannot be kept in {tmp_path} \(--spill\): {os.strerror(errno.EFBIG)}"):
            bisect_nan(ReplayRequest(factory=lambda: run, steps=4, spill=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(run.model[0].weight, weight)
