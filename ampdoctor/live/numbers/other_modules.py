"""Checks, without waiting, modules and copies of weights that a loop keeps beside its models, found from its frames."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.numbers.async_reader import AsyncReader
from ampdoctor.numerics.tensors import extremes_of_each
from ampdoctor.probes.nonfinite import is_written_mask
from ampdoctor.probes.user_code import user_frames

_MOST = 20_000
"""Objects that one look visits at most."""
_LONGEST = 256
"""Entries of a container, or as many as the models have tensors: a longer one holds data."""
_DEEPEST = 4
"""Levels from a frame's variable to a module: `trainer.callbacks[0].ema.module`. A copy in a container may be one
deeper."""
_OURS = 3
"""References to a frame's dict of variables, its own and ours; if there are more, the loop has called `locals()`."""
_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType)
_LOOKED_AT_ELSEWHERE = (torch.optim.Optimizer, torch.amp.GradScaler)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_A_TEST_RUNNER = ("_pytest.", "pluggy.")  # whose objects hold all tests; a frame's variable holds a test's fixtures


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A tensor that was finite at one look and is not at a later one."""

    name: str
    tensor: Tensor
    since: int  # the last step after which it was finite
    step: int  # the step after which it is not


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    there: weakref.ref[Tensor]
    name: str
    copy: bool = False  # not a module's: a gradient's copy is infinite where a scaler skips, and finite again later
    lasts: bool = False  # the loop makes it anew: a later tensor of its name continues it


class OtherModules:
    """Checks tensors beside the models after steps 0, 1, 2, 4 ... and each `every`; once finite, they must stay."""

    def __init__(self, every: int, later: AsyncReader[tuple[int, tuple[int, ...]]] | None = None) -> None:
        self._every = every
        self._later: AsyncReader[tuple[int, tuple[int, ...]]] = AsyncReader() if later is None else later
        self._known: dict[int, _Known] = {}
        self._fine: dict[int | str, int] = {}  # by id, or by name where it is made anew: when it was last finite
        self._modules: set[str] = set()  # the modules of the loop's frames
        self._skipped: tuple[bool | None, bool | None] = (False, False)  # of the last two steps
        self._doubted: set[int | str] = set()  # copies that may be of a skipped step, and finite at the next look

    def stepped(self, *, skipped: bool | None) -> None:
        """Called after a step; `skipped` is None where only a device knows."""
        self._skipped = self._skipped[1], skipped

    def wants(self, step: int) -> bool:
        """Whether a look is due after this step."""
        return step & (step - 1) == 0 or (self._every > 0 and step % self._every == 0)

    def look(self, step: int, models: Sequence[nn.Module]) -> None:
        """Checks the tensors that the loop's frames refer to, beside the models; does not wait."""
        frames = list(user_frames())
        self._modules |= {name for frame in frames if isinstance(name := frame.f_globals.get("__name__"), str)}
        tables = chain.from_iterable((_variables(frame), frame.f_globals.items()) for frame in frames)
        self._meet(list(chain.from_iterable(map(list, tables))), models)
        self._send(step)

    def arrived(self, models: Sequence[nn.Module]) -> Lost | None:
        """Returns the first lost tensor of the looks whose numbers have arrived."""
        return self._first(self._later.ready(), models)

    def finish(self, step: int, models: Sequence[nn.Module]) -> Lost | None:
        """Checks all known tensors that are left after the loop, and waits for them."""
        there = [module for name in self._modules if (module := sys.modules.get(name)) is not None]
        self._meet([pair for module in there for pair in list(vars(module).items())], models)
        self._send(step)
        return self._first(self._later.drain(), models)

    def _meet(self, variables: Iterable[tuple[str, object]], models: Sequence[nn.Module]) -> None:
        mine = [tensor for model in models for _, tensor in _tensors(model)]
        own = {id(tensor) for tensor in mine} | {id(tensor.grad) for tensor in mine if tensor.is_leaf}
        line = torch.Size((sum(one.numel() for model in models for one in model.parameters()),))
        shapes = {tensor.shape for tensor in mine if tensor.numel() > 1} | {line}
        named: set[str] = set()
        for name, value, depth in _kept(variables, longest=max(_LONGEST, len(mine))):
            if isinstance(value, nn.Module):
                for last, tensor in _tensors(value):
                    if id(tensor) not in own and _counts(tensor):
                        self._know(tensor, _Known(there=weakref.ref(tensor), name=f"{name}.{last}"))
                continue
            if id(value) in own or not _is_copy(value) or value.shape not in shapes:
                continue
            # a plain variable may be anything of that shape: the batch, a mask
            lasts = (depth > 0 or value.shape == line) and name not in named
            named.add(name)
            self._know(value, _Known(there=weakref.ref(value), name=name, copy=True, lasts=lasts))
        for key in [key for key in self._fine if isinstance(key, str) and key not in named]:
            del self._fine[key]

    def _know(self, tensor: Tensor, known: _Known) -> None:
        before = self._known.get(id(tensor))
        if before is None or before.there() is not tensor:
            self._known[id(tensor)] = known
            self._fine.pop(id(tensor), None)

    def _send(self, step: int) -> None:
        for key in [key for key, known in self._known.items() if known.there() is None]:
            del self._known[key]
            self._fine.pop(key, None)
        copies = True not in self._skipped
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for key, known in self._known.items():
            tensor = known.there()
            if tensor is not None and (copies or not known.copy):
                groups.setdefault((tensor.device, tensor.dtype), []).append((key, tensor))
        for members in groups.values():
            with unseen(), torch.no_grad():
                flags = torch.stack([f for pair in extremes_of_each(t for _, t in members) for f in pair])
            self._later.put((step, tuple(key for key, _ in members)), [flags.float()])

    def _first(
        self, readings: Iterator[tuple[tuple[int, tuple[int, ...]], list[Tensor]]], models: Sequence[nn.Module]
    ) -> Lost | None:
        found: Lost | None = None
        for (step, keys), (flags,) in readings:
            own = [tensor for model in models for tensor in model.parameters()]
            with unseen():
                finite = flags.isfinite().reshape(-1, 2).all(dim=1).tolist()
            for key, fine in zip(keys, finite, strict=True):
                known = self._known.get(key)
                if known is not None:
                    lost = self._seen(key, known, step, own, fine=fine)
                    found = found or lost
        return found

    def _seen(self, key: int, known: _Known, step: int, own: Sequence[Tensor], *, fine: bool) -> Lost | None:
        name: int | str = known.name if known.lasts else key
        if fine:
            self._fine[key] = self._fine[name] = step
            self._doubted.discard(name)
            return None
        since, tensor = self._fine.get(key, self._fine.get(name)), known.there()
        if since is None or tensor is None:
            return None
        with unseen(), torch.no_grad():
            if known.copy and is_written_mask(tensor, own):
                return None
        if known.copy and None in self._skipped and name not in self._doubted:
            self._doubted.add(name)
            return None
        return Lost(name=known.name, tensor=tensor, since=since, step=step)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns a module's parameters and buffers; none where listing them fails (a module that is not hashable)."""
    try:
        return [*module.named_parameters(), *module.named_buffers()]
    except Exception:  # noqa: BLE001 - the user's own class may raise anything
        return []


def _counts(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a buffer of more than one number: single numbers often hold metrics."""
    plain = type(tensor.detach()) is Tensor and tensor.is_floating_point() and not tensor.is_meta and tensor.numel() > 0
    return plain and tensor.layout == torch.strided and (isinstance(tensor, nn.Parameter) or tensor.numel() > 1)


def _is_copy(tensor: Tensor) -> bool:
    """Whether it has memory of its own, and was not made under autograd."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_leaf or tensor._base is not None:  # noqa: SLF001
        return False
    return tensor.is_floating_point() and not tensor.is_meta and tensor.layout == torch.strided


def _kept(variables: Iterable[tuple[str, object]], *, longest: int) -> Iterator[tuple[str, Any, int]]:
    """Yields (name, value, depth) of modules, each outermost one once, and of tensors outside modules."""
    queue: deque[tuple[str, object, int]] = deque((name, value, 0) for name, value in variables)
    seen: set[int] = set()
    for _ in range(_MOST):
        if not queue:
            return
        name, value, depth = queue.popleft()
        if isinstance(value, (*_LEAVES, *_LOOKED_AT_ELSEWHERE)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module | Tensor):
            yield name, value, depth
        if isinstance(value, Tensor):
            continue
        if depth < _DEEPEST or (depth == _DEEPEST and isinstance(value, dict | list | tuple)):
            queue.extend((_joined(name, key), held, depth + 1) for key, held in _held(value, longest))


def _joined(name: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{name}[{key}]"
    return f"{name}.{key}" if key else name


def _variables(frame: types.FrameType) -> list[tuple[str, object]]:
    """Returns a function's variables; up to Python 3.12 this would keep them alive, so the frame's copy is cleared."""
    if frame.f_locals is frame.f_globals:
        return []
    variables = frame.f_locals
    found = list(variables.items())
    if type(variables) is dict and sys.getrefcount(variables) <= _OURS:
        variables.clear()
    return found


def _held(value: object, longest: int) -> Iterator[tuple[str | int, object]]:
    if isinstance(value, dict):
        if len(value) <= longest:
            items = enumerate(list(dict.items(value)))
            yield from ((str(key) if isinstance(key, str) else place, held) for place, (key, held) in items)
    elif isinstance(value, list | tuple | deque):
        if len(value) <= longest:
            yield from enumerate(list(value))
    elif isinstance(value, set):
        if len(value) <= longest:
            yield from (("", held) for held in list(value))
    elif isinstance(value, types.CellType):
        yield from (("", held) for held in gc.get_referents(value))
    elif isinstance(value, types.MethodType | types.FunctionType | functools.partial):
        yield from _of_function(value)
    elif not str(type(value).__module__).startswith(_OF_A_TEST_RUNNER):
        yield from _attributes(value)


def _of_function(value: types.MethodType | types.FunctionType | functools.partial[Any]) -> Iterator[tuple[str, object]]:
    """Yields what a function was made with: its object, its closure's variables, its arguments."""
    if isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from (("", held) for held in value.__defaults__ or ())
    else:
        yield from (("", held) for held in (value.func, value.args, value.keywords))


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    table = _table(value)
    if isinstance(table, dict) and len(table) <= _LONGEST:
        more = list(table.items())
        yield from (pair for pair in more if pair[0] not in _OF_EVERY_MODULE or not isinstance(value, nn.Module))
    for cls in type(value).__mro__:
        if "__slots__" in vars(cls):
            slots = [pair for pair in vars(cls).items() if type(pair[1]) is types.MemberDescriptorType]
            for name, slot in slots:
                with suppress(AttributeError):  # not bound
                    yield name, slot.__get__(value)


def _table(value: object) -> object:
    """Returns an object's `__dict__` without calling its class's own code."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
