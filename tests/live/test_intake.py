"""What the log says of a loop's data, the time it waits for them, and its memory."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampdoctor.evidence.log_records import DetailLine, RunLine, StepLine
from ampdoctor.evidence.log_text import line_of
from ampdoctor.live import data_stats
from ampdoctor.live.data_stats import Batches
from ampdoctor.workflows.requests import WatchRequest
from ampdoctor.workflows.watcher import TrainingWatcher


@pytest.fixture
def watched(tmp_path):
    """Returns a context in which what trains is watched; gives what was said, and the log's lines by their kind."""

    @contextmanager
    def context(**options):
        seen = SimpleNamespace(said=[])
        doctor = TrainingWatcher(
            WatchRequest(health=str(tmp_path), script="t.py", **options), seen.said.append, seen.said.append
        )
        with doctor.attending():
            yield seen
        doctor.ended(None)
        doctor._log.close()
        lines = [line_of(text).line for text in (tmp_path / "log.jsonl").read_bytes().splitlines()]
        seen.steps = [line for line in lines if isinstance(line, StepLine)]
        seen.details = [line for line in lines if isinstance(line, DetailLine)]
        run = [line for line in lines if isinstance(line, RunLine)][-1]
        seen.names, seen.groups = run.tensors, run.groups

    return context


class Slow(Dataset):
    """Each sample takes its time."""

    def __init__(self, seconds=0.0, count=24):
        self.seconds, self.count = seconds, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((7,), float(index))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.table(input_ids))


def step(model, optimizer, *batches, **named):
    """One update of as many micro-batches."""
    optimizer.zero_grad()
    for batch in batches or (None,):
        (model(**named) if batch is None else model(batch)).float().pow(2).mean().backward()
    optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_samples_and_tokens_of_micro_batches(watched):
    model = Tokens()
    optimizer = sgd(model)
    with watched() as seen:
        for _ in range(3):
            step(model, optimizer, torch.randint(11, (5, 6)), torch.randint(11, (3, 6)))
            with torch.no_grad():
                model(torch.randint(11, (100, 6)))
        mask = torch.ones(2, 9)
        step(model, optimizer, attention_mask=mask, input_ids=torch.randint(11, (2, 9)))
    assert [(line.samples, line.tokens) for line in seen.steps] == [(8, 48), (16, 96), (24, 144), (26, 162)]
    assert seen.said == []


def test_what_a_step_s_batches_are_like(watched):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1))
    optimizer = sgd(model)
    ones, dark = torch.full((4, 3, 2, 2), 2.0), torch.zeros(4, 3, 2, 2)
    with watched() as seen:
        for batches in ((ones, ones + 0), (ones, dark), (dark,), (ones, ones + 0)):
            step(model, optimizer, *batches)
    assert [line.batch_elements for line in seen.steps] == [96, 96, 48, 96]
    assert [line.batch_rms for line in seen.steps] == pytest.approx([2.0, 2.0**0.5, 0.0, 2.0], rel=1e-5)
    assert [line.batch_zero_share for line in seen.steps] == [0.0, 0.5, 1.0, 0.0]
    first, second, third, fourth = (line.batch_fingerprint for line in seen.steps)
    assert first == fourth
    assert len({first, second, third}) == 3


def test_settings_of_each_parameter_group(watched):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0, "lr": 0.5}],
        lr=0.25,
    )
    with watched() as seen:
        step(model, optimizer, torch.ones(2, 3))
    assert [(line.learning_rates, line.weight_decays) for line in seen.steps] == [((0.25, 0.5), (0.1, 0.0))]
    assert [[seen.names[i] for i in group] for group in seen.groups[0]] == [["weight"], ["bias"]]


def counted(model, *calls, world=1):
    """What is counted of a step, of which each call but the first comes after a backward."""
    batches = Batches(world)
    for backwards, (args, kwargs) in enumerate(calls):
        batches.called(model, args, kwargs, backwards=backwards)
    found = batches.stepping("o")
    return found.samples, found.tokens


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(3, 3)


class Replicated(nn.Linear):
    def __init__(self, ranks):
        super().__init__(2, 2)
        self.process_group = SimpleNamespace(size=lambda: ranks)


IDS = torch.zeros(4, 9, dtype=torch.int64)
NOT_CERTAIN = {
    "a list of pictures": (nn.Linear(2, 2), (([torch.zeros(3, 8, 8)] * 2,), {}), 1),
    "a graph": (nn.Linear(2, 2), ((torch.zeros(30, 8), torch.zeros(2, 90, dtype=torch.int64)), {}), 1),
    "no tensor": (nn.Linear(2, 2), ((3,), {}), 1),
    "a single number": (nn.Linear(2, 2), ((torch.tensor(1.0),), {}), 1),
    "batches second": (Second(), ((torch.zeros(5, 2, 3),), {}), 1),
    "ranks of which nobody says that they are replicas": (nn.Linear(2, 2), ((IDS,), {}), 2),
    "replicas of a part of the ranks": (Replicated(2), ((IDS,), {}), 4),
}


@pytest.mark.parametrize("case", NOT_CERTAIN)
def test_what_is_not_certain_is_not_counted(case):
    model, call, world = NOT_CERTAIN[case]
    assert counted(model, call, world=world) == (None, None)


def test_what_is_certain_is():
    plain = nn.Linear(2, 2)
    assert counted(Replicated(4), ((IDS,), {}), world=4) == (16, 144)
    assert counted(plain, (({"labels": IDS[:, 0], "input_ids": IDS, "rope": torch.zeros(1, 9)},), {})) == (4, 36)
    assert counted(plain, ((IDS, torch.tensor(0.5)), {"mask": torch.ones(4, 9)}), ((IDS,), {})) == (4, 36)
    other = torch.zeros_like(IDS)
    assert counted(plain, ((IDS,), {}), ((other,), {})) == (8, 72)


def test_what_was_never_certain_is_not_counted_on_from_there():
    batches = Batches(1)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    batches.called(first, (IDS,), {}, backwards=0)
    assert batches.stepping("o").samples == 4
    batches.called(first, (IDS,), {}, backwards=0)
    batches.called(second, (IDS,), {}, backwards=1)  # a critic: the second half of its batch is no data
    assert batches.stepping("o").samples is None
    batches.called(first, (IDS,), {}, backwards=0)
    assert batches.stepping("o").samples is None
    assert batches.stepping("never called").samples == 4


def test_the_wait_for_data_is_that_of_the_training_thread(watched):
    model = nn.Linear(7, 1)
    optimizer = sgd(model)
    ahead = threading.Thread(target=lambda: list(DataLoader(Slow(0.02), batch_size=8)))
    before = _BaseDataLoaderIter.__next__
    with watched() as seen:
        ahead.start()
        for batch in DataLoader(Slow(0.005), batch_size=8):
            step(model, optimizer, batch)
        ahead.join()
        step(model, optimizer, batch)
    assert _BaseDataLoaderIter.__next__ is before
    first, second, third, none = (line.data_seconds for line in seen.steps)
    assert first is None  # as `seconds`: there was no step before it
    assert none < 0.02  # the end of the loader, and no batch
    for waited, line in ((second, seen.steps[1]), (third, seen.steps[2])):
        assert 0.04 <= waited <= line.seconds
    assert sum((second, third)) < 0.4


def test_memory_is_read_now_and_then_and_never_begun_anew(monkeypatch):
    asked, now = [], [100.0]
    nested = {"allocated_bytes": {"all": {"peak": 12345}}, "num_alloc_retries": 3}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or nested)
    monkeypatch.setattr(data_stats, "monotonic", lambda: now[0])
    on_gpu = SimpleNamespace(device=torch.device("cuda:1"))
    optimizer = SimpleNamespace(param_groups=[{"params": []}, {"params": [on_gpu]}])
    stats = data_stats.DataStats(1)
    found = []
    for _ in range(6):
        found.append(stats.stepping("o", optimizer))
        now[0] += 0.02
    assert asked == [torch.device("cuda:1")] * 2
    assert [one.get("memory_bytes") for one in found] == [12345, None, None, 12345, None, None]
    assert found[3]["memory_retries"] == 3
    assert "memory_bytes" not in stats.stepping("o", sgd(nn.Linear(1, 1)))


class Block(nn.Module):
    """Returns what its last part returns, and calls one part twice."""

    def __init__(self):
        super().__init__()
        self.twice, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.norm(self.twice(self.twice(x))))


def half_step(model, optimizer, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(batch).float().pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_activations_in_half_are_seen_in_the_steps_that_are_looked_at(watched):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(6, 2))
    optimizer, batch = sgd(model), torch.randn(3, 6)
    seen_here = {}
    reference = model[1].register_forward_hook(lambda _m, _a, out: seen_here.update({len(seen_here): out}))
    with watched(every=2) as seen:
        half_step(model, optimizer, batch)
        half_step(model, optimizer, batch)
    reference.remove()
    assert not any(part._forward_hooks for part in model.modules())
    activations = [
        (seen.names[one.tensor], one) for line in seen.details for one in line.tensors if one.role == "activation"
    ]
    assert {line.step for line in seen.details} == {0}
    # a container that returns what its last part has returned is left out
    assert [(name, one.call) for name, one in activations] == [
        ("0.twice", 0),
        ("0.twice", 1),
        ("0.norm", 0),
        ("0.last", 0),
        ("1", 0),
    ]
    _, one = activations[-1]
    out = seen_here[0].detach()
    assert (one.format, one.elements, one.part) == ("fp16", 6, "output")
    assert one.norm == pytest.approx(float(out.float().norm()), rel=1e-5)
    assert one.amax == pytest.approx(float(out.abs().max()), rel=1e-5)
    assert 2.0**one.log2_headroom * one.amax == pytest.approx(65504.0, rel=1e-3)
    assert one.histogram is None
    assert seen.said == []


def test_a_run_in_full_precision_has_none_and_a_compiled_part_is_left_alone(watched):
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 1))
    object.__setattr__(model[0], "_compiled_call_impl", model[0]._call_impl)  # as `model[0].compile()` leaves it
    hooked = []
    original = nn.Module.register_forward_hook

    def noting(self, *args, **kwargs):
        hooked.append(self)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, watched(every=1) as seen:
        patch.setattr(nn.Module, "register_forward_hook", noting)
        step(model, sgd(model), torch.randn(2, 7))
    assert model[1] in hooked
    assert model[0] not in hooked
    assert not [one for line in seen.details for one in line.tensors if one.role == "activation"]
