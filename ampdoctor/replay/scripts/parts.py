"""The parts of a run among what a script's loop sees: its model under the names that the script gives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from ampdoctor.errors import FactoryError
from ampdoctor.replay.guarding.changes import is_users_file
from ampdoctor.replay.reached.walk import PLAIN, is_installed

_LOOKED_AT = 20_000
"""Objects that are looked at: what lies near the loop comes first, and a data set is not walked to its end."""


def seen_from(frame: FrameType) -> list[tuple[str, Any]]:
    """Returns the variables that a loop's frame sees, nearest first: its own, those of its module, of its callers."""
    found: list[tuple[str, Any]] = []
    at: FrameType | None = frame
    while at is not None:
        if is_users_file(at.f_code.co_filename):
            found += (pair for pair in (*at.f_locals.items(), *at.f_globals.items()) if not pair[0].startswith("__"))
        at = at.f_back
    return found


class Variables:
    """What lies within reach of some variables, each under the name that the user's code has for it.

    Args:
        seen: Names and values; of those that are met twice the first counts.
    """

    def __init__(self, seen: Iterable[tuple[str, Any]]) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self._names: dict[int, str] = {}
        known, ahead = set[int](), deque(seen)
        for _ in range(_LOOKED_AT):
            if not ahead:
                break
            name, value = ahead.popleft()
            if isinstance(value, PLAIN) or id(value) in known:
                continue
            known.add(id(value))
            self._names.setdefault(id(value), name)
            if isinstance(value, nn.Module):
                self.modules.append((name, value))
            else:
                ahead.extend(_within(name, value))

    def name_of(self, value: Any, otherwise: str) -> str:
        """Returns the name of an object, without dots."""
        return self._names.get(id(value), otherwise).replace(".", "_")


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.optim.Optimizer):
        inner = vars(value).get("optimizer")  # of a wrapper (Accelerate's), which goes by the same name
        if inner is not None:
            yield name, inner
    elif isinstance(value, Mapping):
        yield from ((key, item) for key, item in value.items() if isinstance(key, str))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}{place}", item) for place, item in enumerate(value[:64]))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in fields(value))
    elif not isinstance(value, type) and hasattr(value, "__dict__") and not is_installed(type(value).__module__):
        yield from list(vars(value).items())


def model_of(variables: Variables, optimizers: Sequence[torch.optim.Optimizer], where: str) -> nn.Module:
    """Returns what the optimizers train: the outermost module that the loop sees, or one that has several as children.

    Args:
        variables: What the loop sees.
        optimizers: Those that it steps.
        where: The loop's place, for an error's sentence.

    Raises:
        FactoryError: No module that it sees holds a parameter of theirs.
    """
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    holds = {id(module): {id(p) for p in module.parameters()} & trained for _, module in variables.modules}
    inside = {id(part) for _, module in variables.modules for part in module.modules() if part is not module}
    outermost = [(name, module) for name, module in variables.modules if id(module) not in inside]
    chosen: list[tuple[str, nn.Module]] = []
    left = set(trained)
    for name, module in sorted(outermost, key=lambda pair: -len(holds[id(pair[1])])):
        if holds[id(module)] & left:
            chosen.append((name, module))
            left -= holds[id(module)]
    if not chosen:
        kinds = ", ".join(sorted({type(one).__name__ for one in optimizers}))
        raise FactoryError(
            f"the loop at {where} steps {kinds}, but sees no torch.nn.Module with their parameters: hand the run over "
            f"as a function that returns a TrainingRun"
        )
    if len(chosen) == 1:
        return chosen[0][1]
    order = {id(module): place for place, (_, module) in enumerate(variables.modules)}
    return _together(sorted(chosen, key=lambda pair: order[id(pair[1])]))


def _together(named: Sequence[tuple[str, nn.Module]]) -> nn.Module:
    """A module that is never called, and has the others as its children under their names."""
    together = nn.Module()
    for name, module in named:
        free = name.replace(".", "_") or "module"
        while hasattr(together, free):
            free += "_"
        together.add_module(free, module)
    return together
