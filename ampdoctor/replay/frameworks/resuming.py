"""Where loaders and schedules stand when a checkpoint is resumed, and stand-ins for a framework's methods."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.replay.snapshot import clone


@dataclass(slots=True, kw_only=True, eq=False)
class RandomPlace:
    """Where the generators stood at a run's start: each of its replays draws from there.

    Attributes:
        common: The state of torch's own generator.
        own: The loaders' generators, each with its state.
    """

    common: torch.Tensor
    own: list[tuple[torch.Generator, torch.Tensor]]

    @classmethod
    def of(cls, loaders: list[Any]) -> RandomPlace:
        """Take it down."""
        return cls(common=torch.get_rng_state(), own=[(one, one.get_state()) for one in generators_of(loaders)])

    def restore_own(self) -> None:
        """Let the loaders' generators stand there again."""
        for generator, state in self.own:
            generator.set_state(state)

    def open(self, make: Callable[[], Any]) -> Any:
        """Returns what `make` makes from there; torch's own generator is then where it was before this call."""
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
    """Let a loader's own generators move as an epoch moves them, without loading anything.

    Args:
        loader: The loader; its sampler knows the epoch.
        taken: Batches that the epoch asks for; None: until there are no more, which moves a sampler once again.
    """
    if not generators_of([loader]) or not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return
    if isinstance(loader.generator, torch.Generator):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as an iterator's seed is drawn
    for _ in itertools.islice(loader.batch_sampler, None if loader.num_workers else taken):  # workers ask ahead
        pass


@contextmanager
def beginning_at(loaders: list[Any], skipped: int) -> Iterator[int]:
    """Iterators that are made inside begin so many batches later, and load none of those; yields how many are left."""
    only = loaders[0] if len(loaders) == 1 else None
    sampler = getattr(only, "batch_sampler", None)
    mapped = isinstance(only, DataLoader) and not isinstance(only.dataset, IterableDataset)
    if not skipped or sampler is None or not mapped:
        yield skipped
        return
    vars(only)["batch_sampler"] = _Later(sampler, skipped)  # an initialised loader refuses the assignment
    try:
        yield 0
    finally:
        vars(only)["batch_sampler"] = sampler


class _Later:
    """A batch sampler from a later batch on."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._skipped, None)

    def __len__(self) -> int:
        return len(self._sampler)


# Lets a learning-rate schedule go on where a checkpoint stands: a replay loads its weights and optimizers only.


def place_schedule(scheduler: Any, steps: int) -> None:
    """Move a fresh schedule on; the rates that the checkpoint has brought stay.

    Where skipped updates did not count, the schedule stands earlier: at the last place that gives those rates.

    Args:
        scheduler: A scheduler of torch's.
        steps: How often it was stepped at most.
    """
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
    """Step it from its first rates; returns after how many steps it gave the wanted rates last."""
    groups, found = scheduler.optimizer.param_groups, None
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for count in range(1, steps + 1):
        scheduler.step()
        now = (float(group["lr"]) for group in groups)
        if wanted and all(math.isclose(mine, theirs, rel_tol=1e-9) for mine, theirs in zip(now, wanted, strict=True)):
            found = count
    return found


# A method of a framework's class that something else stands in for, also if the framework is imported only later.


Original = Callable[..., Any]


@contextmanager
def standing_in(module: str, cls: str, method: str, stand_in: Callable[[Original], Original]) -> Iterator[None]:
    """While inside, a method of a class is another one; nothing is imported for it.

    Args:
        module: The module that defines the class.
        cls: The class.
        method: The method.
        stand_in: Takes the method and returns what stands in for it.
    """
    changed: list[tuple[type, Original]] = []

    def change(imported: ModuleType) -> None:
        found = getattr(imported, cls)
        original = vars(found)[method]
        setattr(found, method, stand_in(original))
        changed.append((found, original))

    finder = _Finder(module, change)
    if module in sys.modules:
        change(sys.modules[module])
    else:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        finder.leave()
        for found, original in changed:
            setattr(found, method, original)


class _Finder(MetaPathFinder):
    """Finds what the others find; one module is changed as soon as it has been run."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._change = change
        self._asks = False
        self._following = ExitStack()

    def leave(self) -> None:
        """A module that was found inside may be run afterwards, and is then its own."""
        self._following.close()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks."""
        if fullname != self._module or self._asks:  # others may ask the others as well
            return None
        self._asks = True
        try:
            specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self._change(module)

        self._following.enter_context(replaced(loader, "exec_module", run_and_change))
