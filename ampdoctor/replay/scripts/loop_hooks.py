"""`LoopHooks`, which the rewritten parts of a user's file call, and the variables that a loop's header reads."""

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
"""Evaluates a loop's header anew; None for a `while`."""
Body = Callable[[Any], Any]
"""The body of a loop; takes an item, and returns how the loop goes on: None for normally."""
OnArrival = Callable[[Items | None, Body, FrameType], None]
"""Called when a run reaches its loop, with its frame; ends the run with `StopScript`, or lets the loop run normally."""


class StopScript(StepHalted):
    """Leaves the script where it is; the script's `except` and `finally` code is not run."""


class Turn(enum.Enum):
    """A marker among a step's items; its copy is itself."""

    NEXT_ROUND = enum.auto()  # the loop starts again with the next item


@dataclass(frozen=True, slots=True)
class BodyReturned:
    """The body returned this value from its function."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a loop that ran normally has ended."""

    broken: bool = False  # by a `break`
    value: Any = None  # the function's return value, in a tuple; None if it goes on


class _Kept:
    """A user's context around the loop, which is not left with it; torch's are, and entered again around each step."""

    def __init__(self, seam: LoopHooks, make: Callable[[], Any]) -> None:
        self._seam, self._make = seam, make

    def __enter__(self) -> Any:
        self._manager = self._make()
        return type(self._manager).__enter__(self._manager)

    def __exit__(self, kind: object, error: object, frames: object) -> Any:
        if isinstance(error, StopScript) and not self._seam.left_in(self._make, self._manager):
            return None
        return type(self._manager).__exit__(self._manager, kind, error, frames)


@contextmanager
def entered(around: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Inside, freshly made contexts are entered, the outermost first."""
    with ExitStack() as stack:
        for make in around:
            stack.enter_context(make())
        yield


def _is_of_torch(manager: Any) -> bool:
    made_by = getattr(manager, "func", type(manager))  # the function behind `contextlib.contextmanager`
    module = getattr(made_by, "__module__", "") or ""
    return module.partition(".")[0] == "torch" and not module.startswith(("torch.utils.tensorboard", "torch.profiler"))


class LoopHooks:
    """Called by the rewritten parts of one run of a script."""

    BROKEN: Final = object()
    OVER: Final = object()
    StopScript = StopScript
    returned = BodyReturned

    def __init__(
        self, arrives: OnArrival, closes: Callable[[Generator[Any, Any, Any]], None] = Generator.close
    ) -> None:
        self._arrives, self._closes = arrives, closes
        self.around: list[Callable[[], Any]] = []  # make the loop's torch contexts, the outermost first
        self.held: list[Any] = []  # the other contexts, which stay entered while this lives; files are closed then

    def left_in(self, make: Callable[[], Any], manager: Any) -> bool:
        """Record a context around the loop; returns whether it must be exited."""
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
        """Replaces the loop; runs it normally, unless the run ends here."""
        self._arrives(items, body, sys._getframe(1))  # noqa: SLF001 the one way to the loop's own variables
        for item in itertools.repeat(None) if items is None else items():
            said = body(item)
            if said is None:
                continue
            if said is self.OVER:
                return End()
            return End(broken=True, value=(said.value,) if isinstance(said, BodyReturned) else None)
        return End()

    def kept(self, make: Callable[[], Any]) -> _Kept:
        """Replaces a context."""
        return _Kept(self, make)

    def kept_as_made(self, manager: Any) -> _Kept:
        """Replaces a context that the script itself makes."""
        return self.kept(lambda: manager)

    def leaving(self) -> bool:
        """Used in a `finally`: is the script being left?"""
        return isinstance(sys.exc_info()[1], StopScript)


# -- the variables that a loop's header reads, as drawing may change what they hold --

_NAMES = {"LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}


def read_by(items: Items | None) -> tuple[Any, ...]:
    """Returns the objects that a header names: for `range(self.epochs)` only the number, and not all of `self`."""
    if items is None:
        return ()
    code: CodeType = items.__code__
    by_itself = any(is_a(one, CodeType) for one in code.co_consts)
    if by_itself or any(one.opname.startswith(("STORE", "DELETE")) for one in dis.get_instructions(code)):
        return (items,)
    return tuple(_read(code, _variables(items)))


def _read(code: CodeType, variables: dict[str, Any]) -> Iterator[Any]:
    known: list[Any] = []  # the last loaded object, while its own attributes are read
    for one in dis.get_instructions(code):
        if one.opname in _ATTRIBUTES and known and one.argval in _own(known[0]):
            known = [_own(known[0])[one.argval]]
            continue
        yield from known
        known = [variables[one.argval]] if one.opname in _NAMES and one.argval in variables else []
    yield from known


def bound_by(body: Body) -> list[Any]:
    """Returns the values of the variables that a loop's body binds, in the order of binding."""
    instructions = dis.get_instructions(body.__code__)
    names = dict.fromkeys(one.argval for one in instructions if one.opname in ("STORE_DEREF", "STORE_GLOBAL"))
    variables = _variables(body)
    return [variables[name] for name in names if name in variables]


def _variables(part: Items | Body) -> dict[str, Any]:
    cells = zip(part.__code__.co_freevars, part.__closure__ or (), strict=True)
    closure = {name: value for name, cell in cells for value in cell_contents(cell)}
    return {**part.__globals__, **closure}


def _own(value: Any) -> dict[str, Any]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if is_a(own, dict) else {}
