"""What a loop keeps beside its models: modules that its frames lead to, looked at now and then without waiting."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampdoctor.live.numbers.later import Later
from ampdoctor.loop.torch_internals import unseen
from ampdoctor.numerics import extremes_of_each
from ampdoctor.probes.ops.source import user_frames

_MOST = 20_000
"""Objects that one look walks over at most."""
_LONGEST = 256
"""Entries of a container: a longer one holds data."""
_DEEPEST = 4
"""Steps from a frame's variable to a module: `trainer.callbacks[0].ema.module`."""
_OURS = 3
"""References to a frame's dict of variables, its own and ours; with more, the loop has called `locals()`."""
_LEAVES = (str, bytes, int, float, complex, type(None), Tensor, type, types.ModuleType, types.FunctionType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A tensor that was finite at one look and is not at a later one.

    Attributes:
        name: Its name.
        tensor: It.
        since: The last step after which it was seen to be finite.
        step: The step after which it is not.
    """

    name: str
    tensor: Tensor
    since: int
    step: int


class Beside:
    """Looks at the parameters and buffers of modules that are no watched model's, and keeps none of them alive.

    A look is made after the steps 0, 1, 2, 4, 8 and so on, then after each `every` steps. What was never seen to be
    finite (memory that nothing has written to, `best = inf`) is nobody's loss.

    Args:
        every: Steps between looks, at most; 0 for those at powers of two alone.
        later: Where readings wait.
    """

    def __init__(self, every: int, later: Later[tuple[int, tuple[int, ...]]] | None = None) -> None:
        self._every = every
        self._later: Later[tuple[int, tuple[int, ...]]] = Later() if later is None else later
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._fine: dict[int, int] = {}  # by id: the last step after which it was finite

    def wants(self, step: int) -> bool:
        """Is a look due after this step?"""
        return step & (step - 1) == 0 or (self._every > 0 and step % self._every == 0)

    def look(self, step: int, models: Iterable[nn.Module]) -> None:
        """Look at what the frames of the loop lead to, beside the models; waits for nothing."""
        own = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
        for name, module in _modules():
            for last, tensor in (*module.named_parameters(), *module.named_buffers()):
                if id(tensor) not in own and _counts(tensor):
                    self._know(f"{name}.{last}", tensor)
        self._send(step)

    def arrived(self) -> Lost | None:
        """Returns the first that is lost, of the looks whose numbers have arrived."""
        return self._first(self._later.ready())

    def finish(self, step: int) -> Lost | None:
        """The loop is over: look at what is left of all that was known, and wait for it."""
        self._send(step)
        return self._first(self._later.drain())

    def _know(self, name: str, tensor: Tensor) -> None:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._known[id(tensor)] = weakref.ref(tensor), name
            self._fine.pop(id(tensor), None)

    def _send(self, step: int) -> None:
        gone = [key for key, (there, _) in self._known.items() if there() is None]
        for key in gone:
            del self._known[key]
            self._fine.pop(key, None)
        there = [(key, tensor) for key, (ref, _) in self._known.items() if (tensor := ref()) is not None]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for key, tensor in there:
            groups.setdefault((tensor.device, tensor.dtype), []).append((key, tensor))
        for members in groups.values():
            with unseen(), torch.no_grad():
                flags = torch.stack([f for pair in extremes_of_each(t for _, t in members) for f in pair])
            self._later.put((step, tuple(key for key, _ in members)), [flags.float()])

    def _first(self, readings: Iterator[tuple[tuple[int, tuple[int, ...]], list[Tensor]]]) -> Lost | None:
        found: Lost | None = None
        for (step, keys), (flags,) in readings:
            with unseen():
                finite = flags.isfinite().reshape(-1, 2).all(dim=1).tolist()
            for key, fine in zip(keys, finite, strict=True):
                if fine:
                    self._fine[key] = step
                elif key in self._fine and found is None:
                    ref, name = self._known.get(key, (None, ""))
                    tensor = None if ref is None else ref()
                    if tensor is not None:
                        found = Lost(name=name, tensor=tensor, since=self._fine[key], step=step)
        return found


def _counts(tensor: Tensor) -> bool:
    """A weight, or a buffer that is more than one number: readings are kept in those."""
    plain = type(tensor.detach()) is Tensor and tensor.is_floating_point() and not tensor.is_meta and tensor.numel() > 0
    return plain and tensor.layout == torch.strided and (isinstance(tensor, nn.Parameter) or tensor.numel() > 1)


def _modules() -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module), each outermost one once, with the names that lead to it."""
    queue: deque[tuple[str, object, int]] = deque()
    for frame in user_frames():
        queue.extend((name, value, 0) for name, value in (*_variables(frame), *list(frame.f_globals.items())))
    seen: set[int] = set()
    for _ in range(_MOST):
        if not queue:
            return
        name, value, depth = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield name, value
        elif depth < _DEEPEST:
            queue.extend((f"{name}.{key}" if key else name, held, depth + 1) for key, held in _held(value))


def _variables(frame: types.FrameType) -> list[tuple[str, object]]:
    """Those of a function; up to Python 3.12 a frame that is asked for them holds them, until it is asked again."""
    if frame.f_locals is frame.f_globals:
        return []
    variables = frame.f_locals
    found = list(variables.items())
    if type(variables) is dict and sys.getrefcount(variables) <= _OURS:
        variables.clear()
    return found


def _held(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        if len(value) <= _LONGEST:
            yield from ((str(key) if isinstance(key, str) else "", held) for key, held in list(dict.items(value)))
    elif isinstance(value, list | tuple | set):
        if len(value) <= _LONGEST:
            yield from (("", held) for held in list(value))
    elif isinstance(value, types.CellType):
        yield from (("", held) for held in gc.get_referents(value))
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(table := _table(value), dict) and len(table) <= _LONGEST:
        yield from list(table.items())


def _table(value: object) -> object:
    """The attributes of an object, without asking its class for any."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
