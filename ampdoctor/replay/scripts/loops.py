"""Finds a script's training loop in its running code, and the objects that each epoch makes anew before the loop."""

from __future__ import annotations

import ast
import copy
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.replay.scripts.rewriting import Edits, is_within, loops_around, way_within
from ampdoctor.replay.user_files import is_users_file


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlace:
    """The place of a loop; `edits` are the changes, by file, that make its body a function."""

    file: str
    line: int
    edits: dict[str, Edits]

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def loops_of(frame: FrameType | None, *, marked: bool = False) -> tuple[LoopPlace, ...]:
    """Returns the loops of user files around a frame, the innermost first."""
    return loops_at(lines_of(() if frame is None else walk_stack(frame)), marked=marked)


def lines_of(frames: Iterable[tuple[FrameType, int]]) -> tuple[tuple[str, int], ...]:
    """Returns the (file, line) pairs of user files among pairs of a frame and its line."""
    lines = ((os.path.realpath(frame.f_code.co_filename), line) for frame, line in frames)
    return tuple((name, line) for name, line in lines if is_users_file(name) and Path(name).is_file())


def loops_at(calls: Sequence[tuple[str, int]], *, marked: bool = False) -> tuple[LoopPlace, ...]:
    """Returns the loops around lines, like `loops_of`; each line is followed by the one that calls it."""
    found: dict[tuple[str, int], LoopPlace] = {}
    for depth, (file, line) in enumerate(calls):
        loops: list[int] = []
        with suppress(OSError, SyntaxError, ValueError):
            loops = loops_around(ast.parse(Path(file).read_bytes()), line, head=marked)
        for loop in loops:
            found.setdefault(
                (file, loop), LoopPlace(file=file, line=loop, edits=_edits(file, loop, calls[depth + 1 :]))
            )
        if marked:
            break
    return tuple(found.values())


def those_left_by(raised: BaseException | None, loops: Iterable[LoopPlace]) -> tuple[LoopPlace, ...]:
    """Returns those loops that an error has come out of."""
    frames = list(walk_tb(None if raised is None else raised.__traceback__))
    around = {(one.file, one.line) for one in loops_at(lines_of(reversed(frames)))}
    return tuple(one for one in loops if (one.file, one.line) in around)


def marks_a_loop(file: Path) -> bool:
    """Does a file use `ampdoctor.steps`?"""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="ampdoctor"), attr="steps"):
                return True
            case ast.ImportFrom(module="ampdoctor", names=names) if any(alias.name == "steps" for alias in names):
                return True
    return False


def _edits(file: str, loop: int, calls: Sequence[tuple[str, int]]) -> dict[str, Edits]:
    lines: dict[str, set[int]] = defaultdict(set)
    for caller, line in calls:
        lines[caller].add(line)
    edits = {caller: Edits(calls=frozenset(found)) for caller, found in lines.items()}
    return {**edits, file: Edits(loop=loop, calls=frozenset(lines[file]))}


@contextmanager
def on_optimizer_step(tell: Callable[[Any, FrameType], None]) -> Iterator[None]:
    """Call `tell` with the optimizer and the caller's frame before each optimizer step and each `GradScaler.step`."""
    original = torch.amp.GradScaler.step

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        tell(optimizer, sys._getframe(1))  # noqa: SLF001 the one way up that makes no traceback
        return original(scaler, optimizer, *args, **kwargs)

    def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        tell(optimizer, sys._getframe(1))  # noqa: SLF001 as above

    handle = register_optimizer_step_pre_hook(hook)
    try:
        with replaced(torch.amp.GradScaler, "step", step):
            yield
    finally:
        handle.remove()


@contextmanager
def on_training_call(tell: Callable[[nn.Module, FrameType], None]) -> Iterator[None]:
    """Call `tell` with module and caller's frame after each outermost module call in training mode with gradients."""
    calling = nn.Module._call_impl.__code__  # noqa: SLF001 the frame that each call of a module has

    def hook(module: nn.Module, _args: Any, _output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            frame = sys._getframe(1)  # noqa: SLF001 the one way up that makes no traceback
            if sum(one.f_code is calling for one, _ in walk_stack(frame)) <= 1:
                tell(module, frame)

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# -- scalers, optimizers and schedulers that each round of a script's loop makes anew --
#
# A replay goes back to the loop, not to the code before it, where the script's next epoch would make them again.

SCALER_EACH_ROUND = (
    "the script makes a GradScaler in each round, so the loss scale begins at its first value each time: make it once, "
    "before the first round"
)
Origin = tuple[tuple[int, str, int], ...]
"""The stack at an object's construction, the innermost frame first: each frame's id, file and line."""


def origin_of(frame: FrameType) -> Origin:
    """Returns the present stack."""
    return tuple((id(at), at.f_code.co_filename, line) for at, line in walk_stack(frame))


def made_in_round(origin: Origin, around: LoopPlace, frame: FrameType) -> bool:
    """Was an object made by every round of the loop `around`? `frame` is in that loop and still running."""
    rounds = {id(at) for at, line in walk_stack(frame) if _is_in(at.f_code.co_filename, line, around)}
    ways = []
    for known, file, line in origin:
        if known in rounds and _is_in(file, line, around):
            ways.append(way_within(file, line, loop=around.line))
            return not any(_makes_once(way) for way in ways)
        ways.append(way_within(file, line))
    return False


class Anew:
    """Resets optimizers, scalers and schedulers of a round to their state when the round reached the loop."""

    def __init__(self, made: Iterable[Any]) -> None:
        kept = tuple(made)
        self._scalers = tuple(one for one in kept if isinstance(one, torch.amp.GradScaler))
        self._optimizers = tuple((one, _settings(one)) for one in kept if isinstance(one, torch.optim.Optimizer))
        self._schedulers = tuple(
            (one, copy.deepcopy(one.state_dict()), _settings(one.optimizer))
            for one in kept
            if isinstance(one, LRScheduler)
        )

    @property
    def scaled(self) -> bool:
        """Is an enabled scaler among them?"""
        return any(one.is_enabled() for one in self._scalers)

    def __call__(self) -> None:
        """Reset them. Scalers keep their present settings, as a change under trial may have set others."""
        for scaler in self._scalers:
            scaler._scale = scaler._growth_tracker = None  # noqa: SLF001 as its constructor leaves them
            scaler._per_optimizer_states.clear()  # noqa: SLF001
        for scheduler, state, settings in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))
            _set(scheduler.optimizer, settings, only="lr")
        for optimizer, settings in self._optimizers:
            optimizer.state.clear()
            _set(optimizer, settings)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


def _set(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]], only: str | None = None) -> None:
    for group, kept in zip(optimizer.param_groups, settings, strict=False):
        group.update({key: copy.deepcopy(value) for key, value in kept.items() if only in (None, key)})


def _is_in(file: str, line: int, loop: LoopPlace) -> bool:
    return is_within(file, line, loop.file, loop.line)


def _makes_once(way: Sequence[ast.AST]) -> bool:
    counters = {name for one in way if isinstance(one, ast.For) for name in _names(one.target)}
    for one in way:
        if isinstance(one, ast.If):
            asked = set(_names(one.test))
            bound = {name for target in _targets(one.body) for name in _names(target)} | counters
            if asked & bound:
                return True
    return False


def _targets(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                yield from node.targets
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                yield node.target


def _names(node: ast.AST) -> Iterator[str]:
    """Yields the names in an expression; of `self.scaler` and `hasattr(self, "scaler")` the last part."""
    attributes = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
    owners = {id(one.value) for one in attributes}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Name) and id(one) not in owners:
            yield one.id
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


# -- the script's optimizers, scalers and schedulers, identified by their order --


class CreatedObjects:
    """The optimizers, scalers and schedulers that were made during `watching`, in order."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Any]] = []
        self._origins: list[Origin] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """List the objects that are made inside."""
        with ExitStack() as stack:
            for kind in (torch.optim.Optimizer, torch.amp.GradScaler, LRScheduler):
                stack.enter_context(replaced(kind, "__init__", self._noting(kind.__init__)))
            yield

    def _noting(self, original: Any) -> Any:
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            if not any(known() is made for known in self._all):
                self._all.append(weakref.ref(made))
                self._origins.append(origin_of(sys._getframe(1)))  # noqa: SLF001 the one way up that makes no traceback
            original(made, *args, **kwargs)

        return init

    def place_of(self, made: Any) -> int | None:
        """Returns an object's position in the order; None if it was made elsewhere."""
        return next((place for place, known in enumerate(self._all) if known() is made), None)

    def at(self, place: int) -> Any:
        """Returns the object at a position; None if it is gone or was never made."""
        return self._all[place]() if place < len(self._all) else None

    def anew(self, around: LoopPlace | None, frame: FrameType) -> Anew:
        """Returns the reset of objects that the running round of `around` has made; `frame` is the script's loop's."""
        made = zip(self._all, self._origins, strict=True)
        return Anew(
            one
            for known, origin in made
            if (one := known()) is not None and around is not None and made_in_round(origin, around, frame)
        )

    def training(self, module: torch.nn.Module) -> tuple[int, ...]:
        """Returns the positions of the optimizers that have a parameter of a module."""
        own = {id(parameter) for parameter in module.parameters()}
        return tuple(
            place
            for place, known in enumerate(self._all)
            if isinstance(made := known(), torch.optim.Optimizer)
            and any(id(one) in own for group in made.param_groups for one in group["params"])
        )

    def scalers(self) -> tuple[int, ...]:
        """Returns the positions of the enabled scalers."""
        return tuple(
            place
            for place, known in enumerate(self._all)
            if isinstance(made := known(), torch.amp.GradScaler) and made.is_enabled()
        )
