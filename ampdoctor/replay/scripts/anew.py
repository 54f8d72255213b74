"""What each round of a script's loop makes anew before it comes to the loop: scalers, optimizers and schedulers.

A replay goes back to the loop and not to what stands before it, where the script's next epoch would make them again.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampdoctor.replay.scripts.source.finding import LoopPlace
from ampdoctor.replay.scripts.source.statements import is_within, way_within

SCALER_EACH_ROUND = (
    "the script makes a GradScaler in each round, so the loss scale begins at its first value each time: make it once, "
    "before the first round"
)
Origin = tuple[tuple[int, str, int], ...]
"""The frames that an object was made in, the innermost first: each with its id, its file and its line."""


def origin_of(frame: FrameType) -> Origin:
    """Returns where an object is being made."""
    return tuple((id(at), at.f_code.co_filename, line) for at, line in walk_stack(frame))


def made_in_round(origin: Origin, around: LoopPlace, frame: FrameType) -> bool:
    """Was an object made in the running round of a loop, by what each round does?

    What a condition makes once is not: one that asks for the object itself, or for the number of the round.

    Args:
        origin: Where it was made.
        around: The loop whose rounds they are.
        frame: A frame inside it, still running.
    """
    rounds = {id(at) for at, line in walk_stack(frame) if _is_in(at.f_code.co_filename, line, around)}
    ways = []
    for known, file, line in origin:
        if known in rounds and _is_in(file, line, around):
            ways.append(way_within(file, line, loop=around.line))
            return not any(_makes_once(way) for way in ways)
        ways.append(way_within(file, line))
    return False


class Anew:
    """Puts what a round has made back to how it was when the round came to the loop.

    Args:
        made: Optimizers, scalers and schedulers.
    """

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
        """Is a scaler that scales among them?"""
        return any(one.is_enabled() for one in self._scalers)

    def __call__(self) -> None:
        """Do it. A scaler begins with the settings that it has now: a change that is tried may have put others."""
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
    """Yields the names that an expression reads or binds; of `self.scaler` and `hasattr(self, "scaler")` the last."""
    attributes = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
    owners = {id(one.value) for one in attributes}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Name) and id(one) not in owners:
            yield one.id
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value
