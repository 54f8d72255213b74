"""The batches behind a place in the data are those that the training draws there, in every epoch, by every source."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ampdoctor import TrainingRun
from ampdoctor.checkpoints.resume_state import RandomNumbers
from ampdoctor.errors import FactoryError
from ampdoctor.replay.batches import BatchBuffer, DataPosition
from ampdoctor.replay.load_checkpoint import set_generators

SKIPS = (0, 1, 5, 6, 7, 12, 13)


class Rows(Dataset):
    loaded = 0

    def __len__(self):
        return 21

    def __getitem__(self, row):
        Rows.loaded += 1
        return row


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(21))


def shuffled(**options):
    return DataLoader(Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


def distributed():
    return DataLoader(Rows(), batch_size=2, sampler=DistributedSampler(Rows(), num_replicas=2, rank=1, seed=4))


SOURCES = {
    "own generator": shuffled,
    "last batch dropped": lambda: shuffled(drop_last=True),
    "row by row": lambda: DataLoader(Rows(), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "in order": lambda: DataLoader(Rows(), batch_size=4),
    "distributed": distributed,
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a list": lambda: [[row] for row in range(6)],
    "a function": lambda: lambda: ([row] for row in range(6)),
}


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epochs_of(source, count):
    """What a training draws that tells its sampler the epoch."""
    found = []
    for epoch in range(count):
        if isinstance(getattr(source, "sampler", None), DistributedSampler):
            source.sampler.set_epoch(epoch)
        found += [plain(batch) for batch in (source() if callable(source) else source)]
    return found


def behind(source, place, count):
    tape = BatchBuffer(TrainingRun(model=nn.Linear(1, 1), batches=source, loss=lambda model, batch: None))
    tape.place = place
    tape.draw(count)
    return [plain(tape[index]) for index in range(len(tape))]


@pytest.mark.parametrize("source", SOURCES)
def test_what_comes_next_is_what_the_training_draws_next(source):
    make = SOURCES[source]
    expected = epochs_of(make(), 6)
    for skip in SKIPS:
        assert behind(make(), DataPosition(batches=skip, epochs=True), 9) == expected[skip : skip + 9], skip


def test_nothing_is_loaded_of_what_is_passed_over():
    Rows.loaded, said = 0, []
    behind(shuffled(), DataPosition(batches=14, say=said.append), 2)
    assert Rows.loaded == 8
    assert said == [
        "14 batches lie behind the checkpoint and were passed over unloaded: the replay begins 2 batches into epoch 2"
    ]


def test_what_can_only_be_drawn_is_drawn_and_dropped_and_this_is_said():
    said = []
    behind(SOURCES["a stream"](), DataPosition(batches=8, epochs=True, say=said.append), 1)
    assert said == ["8 batches were drawn and dropped, to come to the checkpoint's place in the data"]


def test_the_epoch_ends_where_no_other_is_wanted():
    assert len(behind(SOURCES["a list"](), DataPosition(batches=4), 9)) == 2
    assert behind([], DataPosition(batches=4, epochs=True), 9) == []


@pytest.mark.parametrize("saved_at", [3, 6])
def test_random_numbers_go_on_from_the_checkpoint_within_an_epoch_and_at_its_start(saved_at):
    """An epoch that is opened with torch's global generator draws from it, and so does the training behind it."""

    def loader():
        return DataLoader(Rows(), batch_size=4, shuffle=saved_at == 6)

    def go_on(batches, count):
        found = []
        for _, batch in zip(range(count), batches, strict=False):
            found.append((batch.tolist(), torch.rand(()).item(), random.random()))
        return found

    source = loader()
    first = iter(source)
    for _ in range(saved_at):
        next(first)
    state = RandomNumbers(torch=torch.get_rng_state(), python=random.getstate())
    expected = go_on(iter(source) if saved_at == 6 else first, 3)
    torch.manual_seed(77)
    place = DataPosition(batches=saved_at, epochs=True, arrive=lambda: set_generators(state))
    tape = BatchBuffer(TrainingRun(model=nn.Linear(1, 1), batches=loader(), loss=lambda model, batch: None))
    tape.place = place

    def drawn():
        for index in range(3):
            tape.draw(index + 1)
            yield tape[index]

    assert go_on(drawn(), 3) == expected


def test_a_function_is_told_its_start():
    assert behind(lambda start: iter(range(start, start + 3)), DataPosition(steps=40), 9) == [40, 41, 42]
    assert behind(lambda *, start=0: iter(range(start, 2)), DataPosition(), 9) == [0, 1]
    with pytest.raises(FactoryError, match="gave int, which is not iterable"):
        behind(lambda start: start, DataPosition(steps=4), 1)


@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata asks torch for it
def test_a_stateful_loader_goes_on_from_its_own_state():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    source = stateful(Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    drawn = iter(source)
    for _ in range(2):
        next(drawn)
    state = source.state_dict()
    expected = [batch.tolist() for batch in drawn]
    fresh = stateful(Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert behind(fresh, DataPosition(batches=99, state=state, epochs=True), 4) == expected
    again = stateful(Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert behind(again, DataPosition(batches=2), 4) == expected
