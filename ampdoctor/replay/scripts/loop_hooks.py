"""What the rewritten parts of a user's file ask while they run, and which variables a loop's header reads."""

from __future__ import annotations

import dis
import enum
import io
import itertools
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.replay.reachable_state import cell_contents, is_a

Items = Callable[[], Iterable[Any]]
"""Makes what a loop runs over, anew; None in its place for a `while`."""
Body = Callable[[Any], Any]
"""The body of a loop; takes an item, and returns how the loop goes on: None for as ever."""
Arrival = Callable[[Items | None, Body, FrameType], None]
"""Told that a run has come to its loop, in which frame; ends the run with `Left`, or lets the loop run as it is."""


class Left(StepHalted):
    """The script is left where it is; what it would do at its end, or where it is broken off, is not done."""


class Turn(enum.Enum):
    """Stands among a step's items; a copy of it is itself."""

    NEXT_ROUND = enum.auto()
    """The loop begins anew with the item after it."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The body ended its function with this value."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a loop that ran as it is has ended.

    Attributes:
        broken: By a `break`.
        value: What the function is to return now, in a tuple; None if it goes on.
    """

    broken: bool = False
    value: Any = None


class _Kept:
    """A context of the user's around the loop, which is not left with it: a file stays open, a progress bar stays.

    Those of torch are left, because they hold for the whole thread, and entered again around each replayed step.
    """

    def __init__(self, seam: Seam, make: Callable[[], Any]) -> None:
        self._seam, self._make = seam, make

    def __enter__(self) -> Any:
        self._manager = self._make()
        return type(self._manager).__enter__(self._manager)

    def __exit__(self, kind: object, error: object, frames: object) -> Any:
        if isinstance(error, Left) and not self._seam.left_in(self._make, self._manager):
            return None
        return type(self._manager).__exit__(self._manager, kind, error, frames)


@contextmanager
def entered(around: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Inside, contexts that are made anew are in force.

    Args:
        around: Make them, the outermost first.
    """
    with ExitStack() as stack:
        for make in around:
            stack.enter_context(make())
        yield


def _is_of_torch(manager: Any) -> bool:
    made_by = getattr(manager, "func", type(manager))  # the function behind `contextlib.contextmanager`
    module = getattr(made_by, "__module__", "") or ""
    return module.partition(".")[0] == "torch" and not module.startswith(("torch.utils.tensorboard", "torch.profiler"))


class Seam:
    """Asked by the rewritten parts of one run of a script.

    Args:
        arrives: As said at `Arrival`.
        closes: Closes a generator of the user's, whose `finally` is then run, without a change of their files.

    Attributes:
        around: Make the contexts of torch around the loop that was left, the outermost first.
        held: The other contexts around it, which stay entered as long as this lives; a file among them is closed then.

    """

    BROKEN: Final = object()
    OVER: Final = object()
    Left = Left
    returned = Returned

    def __init__(self, arrives: Arrival, closes: Callable[[Generator[Any, Any, Any]], None] = Generator.close) -> None:
        self._arrives, self._closes = arrives, closes
        self.around: list[Callable[[], Any]] = []
        self.held: list[Any] = []

    def left_in(self, make: Callable[[], Any], manager: Any) -> bool:
        """Note that a context is around the loop; returns whether it is to be exited."""
        if _is_of_torch(manager):
            self.around.insert(0, make)
            return True
        self.held.append(manager)
        if isinstance(manager, io.IOBase):
            weakref.finalize(self, manager.close)
        elif isinstance(getattr(manager, "gen", None), Generator):  # of `contextlib.contextmanager`
            weakref.finalize(self, self._closes, manager.gen)
        return False

    def loop(self, items: Items | None, body: Body) -> End:
        """Stands in the loop's place; runs it as it is, unless the run is to end here."""
        self._arrives(items, body, sys._getframe(1))  # noqa: SLF001 the one way to the loop's own variables
        for item in itertools.repeat(None) if items is None else items():
            said = body(item)
            if said is None:
                continue
            if said is self.OVER:
                return End()
            return End(broken=True, value=(said.value,) if isinstance(said, Returned) else None)
        return End()

    def kept(self, make: Callable[[], Any]) -> _Kept:
        """Stands in a context's place."""
        return _Kept(self, make)

    def kept_as_made(self, manager: Any) -> _Kept:
        """Stands in a context's place that is made where it stood."""
        return self.kept(lambda: manager)

    def leaving(self) -> bool:
        """Asked in a `finally`: is the script being left?"""
        return isinstance(sys.exc_info()[1], Left)


# Which variables the parts of a loop name: what its header reads, by which it is known what drawing may move.


_NAMES = {"LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}


def read_by(items: Items | None) -> tuple[Any, ...]:
    """Returns the objects that a header names: of `range(self.epochs)` the number alone, and not the whole of `self`.

    Args:
        items: The header, as a function that evaluates it; None for a `while`.
    """
    if items is None:
        return ()
    code: CodeType = items.__code__
    by_itself = any(is_a(one, CodeType) for one in code.co_consts)
    if by_itself or any(one.opname.startswith(("STORE", "DELETE")) for one in dis.get_instructions(code)):
        return (items,)
    return tuple(_read(code, _variables(items)))


def _read(code: CodeType, variables: dict[str, Any]) -> Iterator[Any]:
    known: list[Any] = []  # what was loaded last, as long as attributes of its own are asked for
    for one in dis.get_instructions(code):
        if one.opname in _ATTRIBUTES and known and one.argval in _own(known[0]):
            known = [_own(known[0])[one.argval]]
            continue
        yield from known
        known = [variables[one.argval]] if one.opname in _NAMES and one.argval in variables else []
    yield from known


def bound_by(body: Body) -> list[Any]:
    """Returns what the variables hold that the body of a loop binds, in the order in which they are bound."""
    instructions = dis.get_instructions(body.__code__)
    names = dict.fromkeys(one.argval for one in instructions if one.opname in ("STORE_DEREF", "STORE_GLOBAL"))
    variables = _variables(body)
    return [variables[name] for name in names if name in variables]


def _variables(part: Items | Body) -> dict[str, Any]:
    cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
    closure = {name: value for name, cell in cells for value in cell_contents(cell)}
    return {**part.__globals__, **closure}


def _own(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object holds itself."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if is_a(own, dict) else {}
