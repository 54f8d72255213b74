"""Copies of the weights (an average, a teacher) that each round of a script's loop makes before it reaches the loop.

When a replay starts the loop anew, their statements run again, and the new copies replace the old ones in all variables
and objects.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampdoctor.hooks.interfaces import describe
from ampdoctor.replay.reachable_state import cell_contents
from ampdoctor.replay.scripts.loop_hooks import Body
from ampdoctor.replay.scripts.loops import LoopPlace
from ampdoctor.replay.scripts.rewriting import LOOPS, SCOPES, is_within, way_within
from ampdoctor.replay.user_files import is_users_file

FAILED = "{name}, a copy of the weights that each round makes, could not be made anew: {why}"
_DEEPEST = 4  # steps from a variable to a copy of a weight: `callbacks[0].ema.shadow["out.weight"]`
_MOST = 4096
_NOT_REMADE = (torch.optim.Optimizer, torch.amp.GradScaler, LRScheduler, torch.utils.data.DataLoader)
_DEFINES = (*SCOPES, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
_MAKER = "__ampdoctor_made_anew__"


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """The code that one frame ran before it reached the loop, or the call that leads there."""

    file: str
    statements: tuple[ast.stmt, ...]
    known: dict[str, Any]  # its globals
    variables: dict[str, Any]  # as they were at the loop


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """An object with copies of weights."""

    name: str  # in the user's code
    value: Any
    holders: tuple[CellType | tuple[dict[str, Any], str], ...]  # cells, and (table, key), that held it at the loop


class Copies:
    """Makes the copies of a run anew; `before` has the frames of the running round, the outermost first."""

    def __init__(self, before: Sequence[_Before], body: Body) -> None:
        self._before, self._body = tuple(before), body
        self._found: list[tuple[list[_Copy], Callable[[], tuple[Any, ...]]]] = []
        self._own: frozenset[int] = frozenset()

    @classmethod
    def of(cls, place: LoopPlace, around: LoopPlace | None, frame: FrameType, body: Body) -> Copies:
        """Returns the copies that the running round of `around` has made before the loop `place` in `frame`."""
        before: list[_Before] = []
        for at, running in walk_stack(frame) if around is not None else ():
            file, line = at.f_code.co_filename, place.line if at is frame else running
            last = around is not None and is_within(file, line, around.file, around.line)
            if is_users_file(file):
                way = way_within(file, line, loop=around.line if last and around is not None else None)
                ends = (n for n, one in enumerate(way, 1) if isinstance(one, LOOPS) and one.lineno == line)
                way = way[: next(ends, None)]
                before.insert(0, _Before(file, tuple(_ahead(way)), at.f_globals, dict(at.f_locals)))
            if last:
                return cls(before, body)
        return cls((), body)

    def find(self, model: torch.nn.Module) -> None:
        """Find the copies of a model's weights."""
        own = [*model.parameters(), *model.buffers()]
        self._own = frozenset(map(id, own))
        shapes = {one.shape for one in own if one.numel() > 1}
        shapes.add(torch.Size((sum(one.numel() for one in model.parameters()),)))
        for before in self._before:
            targets = {name for one in before.statements for name in _targets(one)}
            copies = [
                _Copy(name, value, tuple(self._holders(before, name, value)))
                for name in sorted(targets)
                if (value := _value(before, name)) is not None and self._holds_copies(value, shapes)
            ]
            maker = _maker(before, [copy.name for copy in copies])
            if maker is not None:
                self._found.append((copies, maker))
        self._before = ()

    def __call__(self) -> str:
        """Make them anew; returns a sentence about the result, or "" if there is nothing to report."""
        done: list[str] = []
        for copies, maker in self._found:
            try:
                made = maker()
            except Exception as error:  # noqa: BLE001 - the user's own code
                return FAILED.format(name=copies[0].name, why=describe(error))
            for copy, new in zip(copies, made, strict=True):
                if new is copy.value:
                    continue  # made only once
                if _parts(new, self._own) != _parts(copy.value, self._own):
                    return FAILED.format(name=copy.name, why="it is not made from the same model")
                done.append(copy.name)
                now = _become(copy.value, new)
                for holder in copy.holders:
                    _put(holder, now)
        return f"{', '.join(done)}: made anew in each round, as the script does" if done else ""

    def _holds_copies(self, value: Any, shapes: set[torch.Size]) -> bool:
        found = False
        for one in _walked(value):
            if isinstance(one, _NOT_REMADE):
                return False
            found |= isinstance(one, torch.Tensor) and id(one) not in self._own and one.shape in shapes
        return found and id(value) not in self._own

    def _holders(self, before: _Before, name: str, value: Any) -> Iterator[CellType | tuple[dict[str, Any], str]]:
        owner = name.rpartition(".")[0]
        tables = [one.known for one in self._before]
        if owner:
            tables.append(vars(before.variables[owner]))
        yield from (cell for cell in self._body.__closure__ or () if any(x is value for x in cell_contents(cell)))
        seen: set[int] = set()
        for table in tables:
            if id(table) not in seen:
                seen.add(id(table))
                yield from ((table, key) for key, held in list(table.items()) if held is value)


def _ahead(way: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Yields the statements before the given ones in their blocks, without definitions."""
    for outer, inner in itertools.pairwise(way):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(outer, block, None) or ()
            if any(one is inner for one in statements):
                for one in statements:
                    if one is inner:
                        break
                    if not isinstance(one, _DEFINES):
                        yield one


def _maker(before: _Before, names: Sequence[str]) -> Callable[[], tuple[Any, ...]] | None:
    """Returns a function that runs the statements for some of a frame's variables and returns these, or None."""
    if not names:
        return None
    made = [one for one in before.statements if _asked(one) & set(names)]
    if any(_depends_on_a_number(one, before) for one in made):
        return None
    read = {one.id for statement in made for one in ast.walk(statement) if isinstance(one, ast.Name)}
    if any(isinstance(one, ast.Return | ast.Yield | ast.YieldFrom | ast.Await) for s in made for one in ast.walk(s)):
        return None
    bound = {name for statement in made for name in _targets(statement)}
    variables = {**{name: before.known[name] for name in bound if name in before.known}, **before.variables}
    taken = sorted(name for name in read if name in variables)
    values = [ast.parse(name, mode="eval").body for name in names]
    body = [*made, ast.Return(ast.Tuple(values, ast.Load()))]
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in taken], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    function: Any = ast.parse(f"def {_MAKER}(): pass").body[0]
    function.args, function.body = arguments, body
    module = ast.fix_missing_locations(ast.Module([function], []))
    there: dict[str, Any] = {}
    exec(compile(module, before.file, "exec", dont_inherit=True), before.known, there)  # noqa: S102 - the script's own
    return partial(there[_MAKER], *(variables[name] for name in taken))


def _targets(statement: ast.stmt) -> Iterator[str]:
    """Yields the variables, and attributes of variables, that a statement binds."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _named(node)


def _asked(statement: ast.stmt) -> set[str]:
    return {name for node in ast.walk(statement) if isinstance(node, ast.Name | ast.Attribute) for name in _named(node)}


def _named(node: ast.Name | ast.Attribute) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node.value, ast.Name):
        yield f"{node.value.id}.{node.attr}"


def _value(before: _Before, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    if not owner:
        return before.variables.get(name, before.known.get(name))
    table = _table(before.variables.get(owner))
    return None if table is None else table.get(attribute)


def _depends_on_a_number(statement: ast.stmt, before: _Before) -> bool:
    """Does a condition in it use a counter (`if epoch == 0`)? In another round it may have another value."""
    tests = (node.test for node in ast.walk(statement) if isinstance(node, ast.If | ast.IfExp))
    read = (node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name))
    return any(type(before.variables.get(name)) is int for name in read)


def _walked(value: Any) -> Iterator[Any]:
    """Yields a value, then all that it holds."""
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(value, 0)]
    for one, depth in queue:
        if id(one) in seen or len(seen) > _MOST:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, torch.nn.Module):
            with suppress(Exception):  # the user's own class, which may still train
                queue.extend((tensor, depth) for tensor in (*one.parameters(), *one.buffers()))
        if depth < _DEEPEST:
            queue.extend((held, depth + 1) for held in _held(one))


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, list | tuple):
        return list(value)
    return () if isinstance(value, torch.Tensor | type | FunctionType) else list((_table(value) or {}).values())


def _table(value: Any) -> dict[str, Any] | None:
    """Returns an object's attributes without calling its class."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def _parts(value: Any, own: frozenset[int]) -> set[int]:
    """Returns the ids of the run's own parts that a value reaches."""
    return {id(one) for one in _walked(value) if id(one) in own or isinstance(one, _NOT_REMADE)}


def _become(old: Any, new: Any) -> Any:
    """Returns the object with the new value: the old object, which others may hold, if it can take the value over."""
    if type(old) is not type(new):
        return new
    if isinstance(old, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            return new
        with torch.no_grad():
            old.copy_(new)
        return old
    if isinstance(old, dict):
        dict.clear(old)
        dict.update(old, new)
    elif isinstance(old, list):
        list.__setitem__(old, slice(None), new)
    elif _table(old) is None:
        return new
    mine, others = _table(old), _table(new)
    if mine is not None and others is not None:
        mine.clear()
        mine.update(others)
    return old


def _put(holder: CellType | tuple[dict[str, Any], str], value: Any) -> None:
    if isinstance(holder, CellType):
        holder.cell_contents = value
    else:
        table, key = holder
        table[key] = value
