"""Finds a script's training loop: the innermost loop of the user's own in which an optimizer steps first."""

from __future__ import annotations

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampdoctor.replay.guarding.changes import is_users_file
from ampdoctor.replay.scripts.source.rewriting import Edits
from ampdoctor.replay.scripts.source.statements import loops_around


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlace:
    """Where a loop stands.

    Attributes:
        file: Its file.
        line: Its first line.
        edits: By file, what has to be rewritten so that its body is had alone.
    """

    file: str
    line: int
    edits: dict[str, Edits]

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


def loops_of(frame: FrameType | None, *, marked: bool = False) -> tuple[LoopPlace, ...]:
    """Returns the loops of the user's own files that a frame runs in, the innermost first.

    Args:
        frame: The frame.
        marked: Its line is the head of a loop, which alone is returned.
    """
    return loops_at(lines_of(() if frame is None else walk_stack(frame)), marked=marked)


def lines_of(frames: Iterable[tuple[FrameType, int]]) -> tuple[tuple[str, int], ...]:
    """Returns the lines of the user's own files among those of some frames, each with its file.

    Args:
        frames: Pairs of a frame and its line.
    """
    lines = ((os.path.realpath(frame.f_code.co_filename), line) for frame, line in frames)
    return tuple((name, line) for name, line in lines if is_users_file(name) and Path(name).is_file())


def loops_at(calls: Sequence[tuple[str, int]], *, marked: bool = False) -> tuple[LoopPlace, ...]:
    """Returns the loops that stand around lines, as `loops_of`.

    Args:
        calls: The lines, each in its file, and after it the one that calls it.
        marked: The first is the head of a loop, which alone is returned.
    """
    found: dict[tuple[str, int], LoopPlace] = {}
    for depth, (file, line) in enumerate(calls):
        for loop in _loops_around(file, line, marked=marked):
            found.setdefault(
                (file, loop), LoopPlace(file=file, line=loop, edits=_edits(file, loop, calls[depth + 1 :]))
            )
        if marked:
            break
    return tuple(found.values())


def those_left_by(raised: BaseException | None, loops: Iterable[LoopPlace]) -> tuple[LoopPlace, ...]:
    """Returns those among some loops that an error has come out of.

    Args:
        raised: The error.
        loops: The loops.
    """
    frames = list(walk_tb(None if raised is None else raised.__traceback__))
    around = {(one.file, one.line) for one in loops_at(lines_of(reversed(frames)))}
    return tuple(one for one in loops if (one.file, one.line) in around)


def _loops_around(file: str, line: int, *, marked: bool) -> list[int]:
    try:
        return loops_around(ast.parse(Path(file).read_bytes()), line, head=marked)
    except (OSError, SyntaxError, ValueError):
        return []


def marks_a_loop(file: Path) -> bool:
    """Does a file name `ampdoctor.steps`?"""
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
def told_of_steps(tell: Callable[[Any, FrameType], None]) -> Iterator[None]:
    """Call `tell` before each step of an optimizer, and before a scaler decides whether to skip it.

    Args:
        tell: Takes the optimizer, and the frame from which it is stepped.
    """
    original = torch.amp.GradScaler.step

    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        tell(optimizer, sys._getframe(1))  # noqa: SLF001 the one way up that makes no traceback
        return original(scaler, optimizer, *args, **kwargs)

    def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        tell(optimizer, sys._getframe(1))  # noqa: SLF001 as above

    handle = register_optimizer_step_pre_hook(hook)
    torch.amp.GradScaler.step = step  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.amp.GradScaler.step = original  # type: ignore[method-assign]
        handle.remove()


@contextmanager
def told_of_training_calls(tell: Callable[[nn.Module, FrameType], None]) -> Iterator[None]:
    """Call `tell` after each call of a module in training mode with gradients; of modules in it nothing is told.

    Args:
        tell: Takes the module, and the frame from which it was called.
    """
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
