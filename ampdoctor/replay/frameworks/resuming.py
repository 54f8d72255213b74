"""Positions loaders and schedules at a resumed checkpoint, and replaces methods of frameworks."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ampdoctor.hooks.interfaces import when_imported
from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.replay.snapshot import clone


class Reached(BaseException):
    """Ends a framework's training at its first update; a BaseException, so that no `except Exception` catches it."""


def length_of(loader: Any) -> int | None:
    """Returns the number of a loader's batches; None for an iterable data set without a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def without_first(loader: Any, batches: int) -> Any:
    """Returns a loader that Accelerate has prepared, without its first batches."""
    return sys.modules["accelerate"].skip_first_batches(loader, batches) if batches else loader


def _none() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step of a framework's loop."""

    batches: list[Any]  # micro-batches
    number: int  # updates before it
    closes: bool  # Lightning, Accelerate: it is its epoch's last; Trainer: the optimizer steps after it
    first: bool  # of a replay
    epoch: float = 0  # epochs before it
    index: int = 0  # batches of its epoch before it
    items: Callable[[], Any] = _none  # number of items (tokens), if counted; no cast of the data rounds it in there


@dataclass(slots=True, kw_only=True, eq=False)
class RandomPlace:
    """The generators' states at a run's start, from which each of its replays draws."""

    common: torch.Tensor  # the state of torch's own generator
    own: list[tuple[torch.Generator, torch.Tensor]]  # the loaders' generators with their states

    @classmethod
    def of(cls, loaders: list[Any]) -> RandomPlace:
        """Record the present states."""
        return cls(common=torch.get_rng_state(), own=[(one, one.get_state()) for one in generators_of(loaders)])

    def restore_own(self) -> None:
        """Restore the loaders' generators."""
        for generator, state in self.own:
            generator.set_state(state)

    def open(self, make: Callable[[], Any]) -> Any:
        """Returns the result of `make` with the recorded states; torch's own generator is restored afterwards."""
        now = torch.get_rng_state()
        torch.set_rng_state(self.common)
        self.restore_own()
        try:
            return make()
        finally:
            torch.set_rng_state(now)


def generators_of(loaders: list[Any]) -> list[torch.Generator]:
    """Returns the loaders' own generators, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        for holder in (loader, sampler, batches, getattr(batches, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def pass_over(loader: Any, taken: int | None) -> None:
    """Advance a loader's own generators as an epoch of `taken` batches does (None: to its end), loading nothing."""
    if not generators_of([loader]) or not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return
    if isinstance(loader.generator, torch.Generator):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as an iterator's seed is drawn
    for _ in itertools.islice(loader.batch_sampler, None if loader.num_workers else taken):  # workers prefetch
        pass


def samples_indices(made: Any) -> bool:
    """Is it a DataLoader with a sampler, whose batches can be skipped by index? A stateful one counts what it draws."""
    plain = isinstance(made, DataLoader) and not hasattr(made, "load_state_dict")
    return plain and not isinstance(made.dataset, IterableDataset)


@contextmanager
def beginning_at(loaders: list[Any], skipped: int) -> Iterator[int]:
    """Inside, new iterators skip the first batches without loading them; yields how many the caller must still skip."""
    only = loaders[0] if len(loaders) == 1 else None
    sampler = getattr(only, "batch_sampler", None)
    if not skipped or sampler is None or not samples_indices(only):
        yield skipped
        return
    vars(only)["batch_sampler"] = SkippingSampler(sampler, skipped)  # an initialised loader refuses the assignment
    try:
        yield 0
    finally:
        vars(only)["batch_sampler"] = sampler


class SkippingSampler:
    """A sampler that skips its first indices in each iteration."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._indices: Iterator[Any] | None = None
        self._ahead = 0  # skipped indices that have not been drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_sampler"], name)

    def __len__(self) -> int:
        return max(len(self._sampler) - self._count, 0)

    def __iter__(self) -> Iterator[Any]:
        self._indices, self._ahead = None, self._count
        return self

    def begin(self) -> Iterator[Any]:
        """Draw the skipped indices now, if they were not drawn yet."""
        self._indices = iter(self._sampler) if self._indices is None else self._indices
        while self._ahead:
            self._ahead -= 1
            next(self._indices, None)
        return self._indices

    def __next__(self) -> Any:
        return next(self.begin())


# -- learning-rate schedules: a replay loads only weights and optimizers of a checkpoint --


def place_schedule(scheduler: Any, steps: int) -> None:
    """Advance a fresh torch scheduler by at most `steps` steps; the rates from the checkpoint stay."""
    groups = scheduler.optimizer.param_groups
    loaded = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    begun, rates = clone(scheduler.state_dict()), list(scheduler.get_last_lr())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has not stepped here yet
        place = _walk(scheduler, rates, steps, [float(values["lr"]) for values in loaded])
        if place is not None and place < steps:
            scheduler.load_state_dict(begun)
            _walk(scheduler, rates, place, [])
    for group, values in zip(groups, loaded, strict=True):
        group.update(values)


def _walk(scheduler: Any, rates: list[Any], steps: int, wanted: list[float]) -> int | None:
    """Step it from its first rates; returns the last number of steps after which it had the wanted rates."""
    groups, found = scheduler.optimizer.param_groups, None
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for count in range(1, steps + 1):
        scheduler.step()
        now = (float(group["lr"]) for group in groups)
        if wanted and all(math.isclose(mine, theirs, rel_tol=1e-9) for mine, theirs in zip(now, wanted, strict=True)):
            found = count
    return found


# -- replacing a method of a class that may be imported later --

Original = Callable[..., Any]


@contextmanager
def standing_in(module: str, cls: str, method: str, stand_in: Callable[[Original], Original]) -> Iterator[None]:
    """Inside, `stand_in(method)` replaces a method of a class, also if `module` is imported only later."""
    with ExitStack() as stack:

        def change() -> None:
            found = getattr(sys.modules[module], cls)
            stack.enter_context(replaced(found, method, stand_in(vars(found)[method])))

        stack.enter_context(when_imported(module, change))
        yield
