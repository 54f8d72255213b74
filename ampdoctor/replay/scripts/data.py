"""What a script's loop runs over, step by step: round after round, and from a checkpoint's place on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType
from typing import Any

from torch.utils.data import DataLoader

from ampdoctor.replay.positioning.loaders import epochs_known_by, shuffles_by_the_process
from ampdoctor.replay.positioning.place import ORDER_UNKNOWN
from ampdoctor.replay.reached.walk import cell_contents
from ampdoctor.replay.scripts.seam import Body, Items, Turn
from ampdoctor.replay.scripts.trying import Lesson


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """What the loop runs over. It is ours, so that what it reaches does not count as reached.

    Attributes:
        items: Makes it; None for a `while`.
        behind: How many of the items it makes were run before the first step.
        loaders: The DataLoaders among what its header reads.
        next_round: Told that the loop has come to its end; returns whether it begins anew, as in the next epoch.
        say: Told where the data may be others than the training's.
    """

    items: Items | None
    behind: int
    loaders: tuple[DataLoader[Any], ...]
    next_round: Callable[[], bool]
    say: Callable[[str], None]

    def drawn(self) -> Iterator[Any]:
        """Yields the items, round after round; a source that gives nothing the second time was an iterator.

        Before the first item of each later round stands `Turn.NEXT_ROUND`.
        """
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
    """Returns the DataLoaders among what a header reads, whose epochs the user's file tells them.

    Args:
        read: The objects that the header names.
        file: The file of the loop: where it speaks of no `set_epoch`, no epoch is told.
    """
    told = "set_epoch" in Path(file).read_text(encoding="utf-8", errors="replace")
    found = tuple(value for value in read if isinstance(value, DataLoader))
    return found if told else tuple(loader for loader in found if not epochs_known_by(loader, data=True))


def steps(rounds: Rounds, _read: object, lesson: Lesson, over: Sequence[bool], start: int = 0) -> Iterator[list[Any]]:
    """Yields, for each step, the items that it takes, as the loop draws them.

    Args:
        rounds: What the loop runs over.
        _read: What its header reads, an argument of its own: what that reaches counts as reached by drawing.
        lesson: How many make a step.
        over: Has an entry once the loop has ended.
        start: Optimizer steps whose items are passed over.
    """
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
    """Returns the next items, and the turns before them; fewer at the end."""
    taken: list[Any] = []
    while many and (item := next(drawn, Turn)) is not Turn:
        taken.append(item)
        many -= item is not Turn.NEXT_ROUND
    return taken if not many else []


def passed(items: Items | None, before: int, run: Callable[[list[Any]], Any]) -> int:
    """Run the iterations before the first that belongs to a step; returns how many a new look at the items repeats."""
    if not before:
        return 0
    if items is None:
        run([None] * before)
        return 0
    made = items()
    run(list(itertools.islice(iter(made), before)))
    return 0 if iter(made) is made else before


def set_counters(body: Body, saved: Mapping[str, float]) -> dict[str, float]:
    """Put a checkpoint's numbers into the loop's variables of the same names; returns those that were put.

    They are variables that the body uses, or attributes of an object whose method it is, and hold a number already.

    Args:
        body: The body of the loop.
        saved: Numbers by name.
    """
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
