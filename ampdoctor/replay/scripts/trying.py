"""Runs a script's loop once to learn what its steps consist of, and yields its items for the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CellType
from typing import Any

import torch
from torch.utils.data import DataLoader

from ampdoctor.hooks.callbacks import on_scaler_call
from ampdoctor.hooks.torch_internals import Backward, replaced, seen_backwards
from ampdoctor.precision.casting import HALVES
from ampdoctor.precision.dtype_overrides import computes_in
from ampdoctor.precision.fake_gpu.emulate import device_named
from ampdoctor.replay.batches import ORDER_UNKNOWN, epochs_known_by, shuffles_by_the_process
from ampdoctor.replay.reachable_state import cell_contents
from ampdoctor.replay.scripts.loop_hooks import Body, Items, Turn, entered
from ampdoctor.replay.scripts.loops import Anew, CreatedObjects, on_optimizer_step, on_training_call

ENOUGH = 8
"""Items of a loop worth replaying: as many as `bisect-nan` replays steps. A shorter loop is part of a step."""
_MOST_TOGETHER = 1024
"""Iterations from the first backward on within which an optimizer must step."""
_MOST_BEFORE = 100_000
"""Iterations until a first backward must come: filling a buffer of experience takes some ten thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopShape:
    """What a loop's first step has shown.

    `updates` is the number of optimizer steps until all failures of them show. It is two if autocast is entered around
    the loop: autocast caches half copies of the weights, and in the second step they are stale.
    """

    items: int  # of the loop, up to `ENOUGH`
    before: int  # iterations before the first backward (a buffer is filled): they belong to no step
    together: int  # iterations in one optimizer step
    updates: int
    optimizers: tuple[int, ...]  # positions in `CreatedObjects` of those that it steps
    scalers: tuple[int, ...]  # positions in `CreatedObjects` of those that it uses
    autocast: str | None  # format of its autocast regions; None without one
    autocast_on: str | None  # device type that the first of them names ("cpu"), which an emulated GPU does not change
    ended: bool  # the loop has ended in its first step


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that a run of the script has reached."""

    items: Items | None  # None for a `while`
    body: Body
    seen: list[tuple[str, Any]]  # the variables that it sees
    anew: Anew  # resets objects of a round


def tried(  # noqa: C901 one loop, and its listeners
    loop: Loop, around: Sequence[Callable[[], Any]], made: CreatedObjects, *, never_steps: bool = False
) -> LoopShape:
    """Runs a loop's body until an optimizer has stepped; `around` make the contexts around it."""
    stepped: dict[int, None] = {}
    scalers: dict[int, None] = {}
    regions: dict[torch.dtype, str] = {}  # format -> device type of the first

    casts_kept = False

    def step(optimizer: Any, _frame: Any) -> None:
        nonlocal casts_kept
        casts_kept |= torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        place = made.place_of(optimizer)
        if place is not None:
            stepped[place] = None

    def scaling(scaler: Any, _method: str, _losses: Any, run: Callable[[], Any]) -> Any:
        place = made.place_of(scaler)
        if place is not None:
            scalers[place] = None
        return run()

    backwards = 0

    def backward(seen: Backward, run: Callable[[], Any]) -> Any:
        nonlocal backwards
        backwards += seen.accumulated
        return run()

    def call(module: torch.nn.Module, _frame: Any) -> None:  # counts as a step of its optimizers, with all scalers
        stepped.update(dict.fromkeys(made.training(module)))
        scalers.update(dict.fromkeys(made.scalers()))

    source: Iterator[Any] = itertools.repeat(None) if loop.items is None else iter(loop.items())
    count, before, said = 0, 0, None
    with ExitStack() as stack:
        for told in (
            on_optimizer_step(step),
            on_scaler_call(scaling, methods=("scale",)),
            _told_of_regions(regions.setdefault),
        ):
            stack.enter_context(told)
        stack.enter_context(on_training_call(call) if never_steps else nullcontext())
        stack.enter_context(seen_backwards(backward))
        stack.enter_context(entered(around))
        for item in source:
            count += 1
            try:
                said = loop.body(item)
            except (Exception, SystemExit):  # at a non-finite loss, for example: the replay reports it
                if not stepped:
                    raise
            if not (backwards or stepped):
                before = count
            if said is not None or stepped or before == _MOST_BEFORE or count - before == _MOST_TOGETHER:
                break
    ended = said is not None
    half = next((dtype for dtype in HALVES if dtype in regions), None)
    more = 0 if ended or not stepped else sum(1 for _ in itertools.islice(source, max(0, ENOUGH - count)))
    return LoopShape(
        items=count + more,
        before=before,
        together=max(count - before, 1),
        updates=2 if around and casts_kept else 1,
        optimizers=tuple(stepped),
        scalers=tuple(scalers),
        autocast=None if half is None else HALVES[half],
        autocast_on=None if half is None else regions[half],
        ended=ended,
    )


def _told_of_regions(tell: Callable[[torch.dtype, str], object]) -> AbstractContextManager[None]:
    original = torch.autocast.__enter__

    def enter(region: Any) -> Any:
        dtype = computes_in(region)
        if dtype is not None:
            tell(dtype, device_named(region))
        return original(region)  # type: ignore[no-untyped-call]

    return replaced(torch.autocast, "__enter__", enter)


# -- the items of a script's loop, step by step, over several rounds, and from a checkpoint's position on --


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedEpochs:
    """The items of the loop. This class is ours, so that what it reaches does not count as reached by user code."""

    items: Items | None  # None for a `while`
    behind: int  # items that were run before the first step
    loaders: tuple[DataLoader[Any], ...]  # those that the loop's header reads
    next_round: Callable[[], bool]  # called at the loop's end; returns whether it starts anew, as in the next epoch
    say: Callable[[str], None]  # gets a sentence if the data may differ from the training's

    def drawn(self) -> Iterator[Any]:
        """Yields the items, round after round, with `Turn.NEXT_ROUND` before each later round."""
        if self.items is None:
            yield from itertools.repeat(None)
            return
        holders = [holder for loader in self.loaders for holder in epochs_known_by(loader, data=True)]
        first = [epoch if type(epoch := getattr(holder, "epoch", 0)) is int else 0 for holder in holders]
        for number in itertools.count():
            for holder, epoch in zip(holders, first, strict=True) if number else ():
                holder.set_epoch(epoch + number)
            empty = True
            for item in self.items():
                if empty and number:
                    yield Turn.NEXT_ROUND
                empty = False
                yield item
            if empty or not self.next_round():
                return


def loaders_of(read: Sequence[Any], file: str) -> tuple[DataLoader[Any], ...]:
    """Returns the DataLoaders that a header reads; those with `set_epoch` only if the user's file calls it."""
    told = "set_epoch" in Path(file).read_text(encoding="utf-8", errors="replace")
    found = tuple(value for value in read if isinstance(value, DataLoader))
    return found if told else tuple(loader for loader in found if not epochs_known_by(loader, data=True))


def steps(
    rounds: RecordedEpochs,
    _read: object,  # what the header reads: as an argument, it counts as reached by drawing
    lesson: LoopShape,
    over: Sequence[bool],  # not empty after the loop has ended
    start: int = 0,
) -> Iterator[list[Any]]:
    """Yields, for each step, its items, as the loop draws them; `start` optimizer steps are skipped."""
    drawn = rounds.drawn()
    if rounds.items is not None:
        _next_items(drawn, rounds.behind + start * lesson.together)
        if start and any(map(shuffles_by_the_process, rounds.loaders)):
            rounds.say(ORDER_UNKNOWN)
    many = lesson.together * lesson.updates
    while not over:
        step = _next_items(drawn, many)
        if not step:
            return
        yield step


def _next_items(drawn: Iterator[Any], many: int) -> list[Any]:
    taken: list[Any] = []
    while many and (item := next(drawn, Turn)) is not Turn:
        taken.append(item)
        many -= item is not Turn.NEXT_ROUND
    return taken if not many else []


def passed(items: Items | None, before: int, run: Callable[[list[Any]], Any]) -> int:
    """Run the iterations before the first step; returns how many of them a new iterator would repeat."""
    if not before:
        return 0
    if items is None:
        run([None] * before)
        return 0
    made = items()
    run(list(itertools.islice(iter(made), before)))
    return 0 if iter(made) is made else before


def set_counters(body: Body, saved: Mapping[str, float]) -> dict[str, float]:
    """Set the loop's numeric variables to a checkpoint's numbers of the same names; returns those that were set."""
    put: dict[str, float] = {}
    code, known = body.__code__, body.__globals__
    cells: dict[str, CellType] = dict(zip(code.co_freevars, body.__closure__ or (), strict=True))
    owner = cell_contents(cells["self"]) if "self" in cells else ()
    own = [vars(value) for value in owner if hasattr(value, "__dict__")]
    for name, number in saved.items():
        if name in cells and any(map(_is_number, cell_contents(cells[name]))):
            cells[name].cell_contents = put[name] = number
        elif name in code.co_names and _is_number(known.get(name)):
            known[name] = put[name] = number
        for attributes in own:
            if _is_number(attributes.get(name)):
                attributes[name] = put[name] = number
    return put


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
