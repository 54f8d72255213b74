"""The same global batch on any number of ranks: which samples, how many, and what their losses weigh."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, default_collate

import ampdoctor
from ampdoctor.batching.plans import exact_plans
from ampdoctor.errors import UsageError
from ampdoctor.training.elastic_batch import parts_of

WORLDS = (1, 2, 3, 4, 6)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def each_rank(monkeypatch):
    """Returns a function that gives `elastic_batch` of every rank, as each would see it under torchrun."""

    def ranks(world, *arguments):
        for rank in range(world):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world))
            yield ampdoctor.elastic_batch(*arguments)

    return ranks


def cut(batch):
    return batch.micro_batch, batch.accumulation, batch.data_parallel


def test_the_case_that_it_began_with(each_rank):
    assert cut(next(each_rank(512, 2048, 4))) == (4, 1, 512)
    assert cut(next(each_rank(128, 2048, 4))) == (4, 4, 128)
    assert cut(next(each_rank(128, 2048, 8))) == (8, 2, 128)
    assert [batch.rank for batch in each_rank(3, 6, 2)] == [0, 1, 2]


def test_a_process_that_is_alone_does_it_all():
    assert cut(ampdoctor.elastic_batch(2048, 8)) == (8, 256, 1)
    assert cut(ampdoctor.elastic_batch(np.int64(8), torch.tensor(4))) == (4, 2, 1)


def test_ranks_that_do_not_divide_the_batch_share_it_all_the_same(each_rank):
    batches = list(each_rank(3, 16, 4))
    assert [cut(batch) for batch in batches] == [(3, 2, 3)] * 3
    sizes = [[len(m) for m in batch.sampler(range(16))] for batch in batches]
    assert sizes == [[2, 3], [3, 2], [3, 3]]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 17))
def test_each_sample_is_in_one_micro_batch(samples, ranks, accumulation):
    parts = [list(parts_of(samples, rank=rank, ranks=ranks, accumulation=accumulation)) for rank in range(ranks)]
    counted = [part for own in parts for part in own if part.counts]
    assert [i for part in counted for i in range(part.begin, part.end)] == list(range(samples))
    assert all(part.end - part.begin <= -(-samples // (ranks * accumulation)) for part in counted)
    assert all(1 <= len(own) <= accumulation for own in parts)
    assert sum(not part.counts for own in parts for part in own) == max(ranks - samples, 0)


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_another_cluster_cuts_the_same_micro_batches_where_their_number_stays(samples, ranks, accumulation, times):
    def every(ranks, accumulation):
        cut = (parts_of(samples, rank=rank, ranks=ranks, accumulation=accumulation) for rank in range(ranks))
        return [part for own in cut for part in own if part.counts]

    assert every(ranks * times, accumulation) == every(ranks, accumulation * times)


def samples_of_steps(batches, length, epoch, start=0, **more):
    """The samples of each step, over all ranks, in the step's own order."""
    ranks = []
    for batch in batches:
        sampler = batch.sampler(range(length), seed=5, **more)
        sampler.set_epoch(epoch, start=start)
        loader = DataLoader(range(length), batch_sampler=sampler)
        assert len(loader) == len(list(sampler))
        ranks.append([[m.data.tolist() for m in step if m.weight] for step in sampler.steps(loader)])
    return [[i for own in step for micro in own for i in micro] for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_step_has_the_same_samples_at_any_world_size(each_rank, drop_last):
    seen = [samples_of_steps(each_rank(world, 12, 4), 50, 2, drop_last=drop_last) for world in WORLDS]
    assert all(steps == seen[0] for steps in seen)
    assert [len(step) for step in seen[0]] == [12] * 4 + ([] if drop_last else [2])
    flat = list(itertools.chain(*seen[0]))
    assert len(set(flat)) == len(flat)


def test_a_restart_goes_on_where_the_checkpoint_was(each_rank):
    whole = samples_of_steps(each_rank(4, 12, 4), 50, 1)
    assert samples_of_steps(each_rank(2, 12, 4), 50, 1, start=3) == whole[3:]
    assert samples_of_steps(each_rank(2, 12, 4), 50, 1, start=5) == []
    assert samples_of_steps(each_rank(2, 12, 4), 50, 0) != whole


@pytest.mark.parametrize("world", [4])
def test_steps_have_the_samples_of_a_distributed_sampler(each_rank, world):
    theirs = []
    for rank in range(world):
        sampler = DistributedSampler(range(48), num_replicas=world, rank=rank, seed=5)
        sampler.set_epoch(3)
        theirs.append(list(DataLoader(range(48), sampler=sampler, batch_size=12 // world)))
    steps = [sorted(torch.cat(step).tolist()) for step in zip(*theirs, strict=True)]
    assert [sorted(step) for step in samples_of_steps(each_rank(world, 12, 12), 48, 3)] == steps


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def reduced(gradients):
    """What DDP makes of the ranks' gradients."""
    return [torch.stack(parts).mean(0) for parts in zip(*gradients, strict=True)]


def by_samples(model, x, y):
    return functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("samples", [12, 7, 2])
def test_a_step_has_the_gradient_of_the_mean_over_its_samples(each_rank, world, samples):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (samples,), generator=generator)
    model = net()
    whole = torch.autograd.grad(by_samples(model, x, y), list(model.parameters()))
    found, losses = [], []
    for batch in each_rank(world, 12, 3):
        (step,) = batch.steps([{"x": x, "y": y}])
        assert (step.samples, len(step)) == (samples, len(step.micro_batches))
        assert [micro.last for micro in step] == [False] * (len(step) - 1) + [True]
        model.zero_grad()
        for micro in step:
            loss = by_samples(model, **micro.data) * micro.weight
            loss.backward()
            losses.append(loss.item() / world)
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(reduced(found), whole, strict=True):
        torch.testing.assert_close(one, other)
    assert sum(losses) == pytest.approx(by_samples(model, x, y).item())


def test_a_sum_over_tokens_is_divided_by_all_of_them():
    labels = torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100], [0, 1, 2, 3], [-100] * 4, [2, 2, 2, -100]])
    x = torch.randn(*labels.shape, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = net()

    def loss_of(data, reduction):
        logits = model(data["x"]).flatten(0, 1)
        return functional.cross_entropy(logits, data["labels"].flatten(), reduction=reduction)

    whole = {"x": x, "labels": labels}
    expected = torch.autograd.grad(loss_of(whole, "mean"), list(model.parameters()))
    batch = ampdoctor.elastic_batch(5, 2)
    (step,) = batch.steps([whole], count=lambda data: (data["labels"] != -100).sum())
    for micro in step:
        (loss_of(micro.data, "sum") * micro.weight).backward()
    assert {micro.weight for micro in step} == {1 / 10}
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, other)


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        ([torch.zeros(3), torch.zeros(4)], "the batch of step 0 has 3 samples of 4 and is not the last"),
        ([torch.zeros(5)], "the batch of step 0 has 5 samples, more than 4"),
        ([{"x": torch.zeros(4), "y": torch.zeros(2)}], r"differ in their number of samples \(x: 4, y: 2\)"),
        (["text"], "str has none"),
        ([torch.zeros(0, 3)], "has no sample"),
    ],
)
def test_batches_that_are_no_global_ones_are_refused(batches, sentence):
    with pytest.raises(UsageError, match=sentence):
        list(ampdoctor.elastic_batch(4, 2).steps(batches))


def test_a_loader_of_another_sampler_is_refused():
    batch = ampdoctor.elastic_batch(4, 2)
    sampler = batch.sampler(range(8))
    with pytest.raises(UsageError, match="another batch_sampler"):
        list(sampler.steps(DataLoader(range(8), batch_size=2)))
    with pytest.raises(UsageError, match="the loader ended in step 1"):
        list(sampler.steps([[0, 1]] * 3))
    with pytest.raises(UsageError, match="more batches than its sampler"):
        list(sampler.steps([[0, 1]] * 5))


@pytest.mark.parametrize("counted", [0.5, -1, True, None, "3", float("inf"), torch.tensor(1.8), torch.tensor([1, 2])])
def test_a_count_that_is_no_whole_number_is_refused(counted):
    """Truncated it would weigh the losses by another number than theirs: 1/6 for 1/9 in one case."""
    with pytest.raises(UsageError, match="count gives a whole number of at least 0 for each micro-batch, not "):
        next(ampdoctor.elastic_batch(4, 2).steps([torch.zeros(4)], count=lambda _: counted))


def test_a_whole_number_is_one_in_any_form_and_nothing_weighs_nothing():
    for one in (3, 3.0, torch.tensor([3]), np.int64(3)):
        (step,) = ampdoctor.elastic_batch(4, 2).steps([torch.zeros(4)], count=lambda _, one=one: one)
        assert [micro.weight for micro in step] == [1 / 6] * 2
    (step,) = ampdoctor.elastic_batch(4, 2).steps([torch.zeros(4)], count=lambda _: 0)
    assert [micro.weight for micro in step] == [0.0, 0.0]


class Pair(NamedTuple):
    x: torch.Tensor
    names: tuple[str, ...]


def test_what_has_an_item_a_sample_is_cut_with_its_tensors():
    texts, batch = list("abcd"), ampdoctor.elastic_batch(4, 2)
    collated = default_collate([{"x": torch.zeros(2), "text": text, "pair": (text, 1)} for text in texts])
    rows = [{"id": 1}, None, "c", [4, 4, 4]]
    more = {"rows": rows, "size": (1, 2, 3, 4), "two": ["u", "v"], "named": Pair(torch.arange(4), tuple(texts))}
    more |= {"nested": (torch.arange(4), [torch.arange(8).view(4, 2)]), "factor": torch.tensor(3.0), "task": "copy"}
    (step,) = batch.steps([collated | more], start=7)
    assert step.step == 7
    first, second = (micro.data for micro in step)
    assert first["nested"][0].tolist() == [0, 1]
    assert second["nested"][1][0].tolist() == [[4, 5], [6, 7]]
    assert (second["factor"], second["task"]) == (3.0, "copy")
    assert (first["text"], second["text"]) == (["a", "b"], ["c", "d"])
    assert second["pair"][0] == ("c", "d")
    assert second["pair"][1].tolist() == [1, 1]
    assert (first["rows"], second["rows"]) == (rows[:2], rows[2:])
    assert (second["size"], second["two"]) == ((1, 2, 3, 4), ["u", "v"])
    assert (second["named"].x.tolist(), second["named"].names) == ([2, 3], ("c", "d"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((8.5, 2), "global_batch is a whole number, not 8.5"),
        ((True, 2), "global_batch is a whole number, not True"),
        ((8, None), "max_micro_batch is a whole number, not None"),
        ((0, 1), "not 0"),
        ((4, -1), "not -1"),
        ((10**8, 10**8), "a global batch of 100000000 is beyond 16777216: it counts samples, not tokens"),
    ],
)
def test_what_is_no_number_of_samples_is_refused(arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        ampdoctor.elastic_batch(*arguments)


def test_the_largest_batch_is_cut_at_once():
    assert len(exact_plans(10**12, 1, 10**12)) == 13 * 13  # by trial of each size this would take a day


def test_more_ranks_than_samples_are_refused(each_rank):
    with pytest.raises(UsageError, match="a global batch of 3 leaves some of 4 ranks without a sample"):
        next(each_rank(4, 3, 1))


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("", "2"), ("-1", "2"), ("9" * 5000, "2")])
def test_an_environment_that_names_no_process_is_a_sentence(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match="name no process of a group"):
        ampdoctor.elastic_batch(4, 2)


def test_a_process_group_comes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert cut(ampdoctor.elastic_batch(8, 4)) == (4, 2, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_the_items_of_all_ranks_count(each_rank, monkeypatch):
    batches = list(each_rank(2, 4, 2))

    def gathered(found, own, group):
        found[:] = [own, 7]

    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, all_gather_object=gathered)
    monkeypatch.setattr("ampdoctor.training.elastic_batch.dist", group)
    (step,) = batches[0].steps([torch.zeros(4)], count=lambda data: 3)
    assert [micro.weight for micro in step] == [2 / (3 + 7)]
    counted = []
    monkeypatch.setattr(group, "all_gather_object", lambda found, own, group: counted.append(own))
    list(batches[0].steps([torch.zeros(1)], count=lambda data: 3))
    assert counted == [0]  # a rank without a sample repeats one, which does not count


def test_counting_over_ranks_needs_their_group(each_rank):
    batch = next(each_rank(2, 4, 2))
    with pytest.raises(UsageError, match="init_process_group"):
        next(batch.steps([torch.zeros(4)], count=len))


@pytest.mark.parametrize(
    ("where", "sentence"),
    [((0, 4), "an epoch has 3 steps"), ((1.5,), "an epoch is a whole number"), ((1, 0.0), "start is a whole number")],
)
def test_an_epoch_that_there_is_not(where, sentence):
    sampler = ampdoctor.elastic_batch(4, 2).sampler(range(9))
    with pytest.raises(UsageError, match=sentence):
        sampler.set_epoch(*where)
    sampler.set_epoch(torch.tensor(3), 1)
    assert len(list(sampler)) == len(sampler) == 3


@pytest.mark.parametrize(("length", "drop_last"), [(0, False), (3, True)])
def test_data_that_fill_no_step_are_refused(length, drop_last):
    with pytest.raises(UsageError, match="fill no step"):
        ampdoctor.elastic_batch(4, 2).sampler(range(length), drop_last=drop_last)
