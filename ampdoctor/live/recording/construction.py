"""With what a model was made: the arguments of the user's own modules, noted as they are made."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

from torch import nn

from ampdoctor.hooks.json_values import NotInertError, class_name, written
from ampdoctor.hooks.torch_internals import replaced

_LARGEST = 10_000
"""Arguments of a model of which more than so many were noted are no model's parts: then nothing is noted any more."""


class Constructions:
    """Notes how modules are made.

    The arguments are written down at once: nothing of the user's is kept alive, and what a constructor changes later is
    as it was given.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[nn.Module, Mapping[str, Any]] = weakref.WeakKeyDictionary()
        self._codes: weakref.WeakKeyDictionary[type, frozenset[CodeType]] = weakref.WeakKeyDictionary()

    def of(self, module: nn.Module) -> Mapping[str, Any] | None:
        """Returns the class of a module and its arguments; None for a module that was not seen being made.

        `{"class": "module:qualname", "file": str | None}` and either `args` and `kwargs` (trees, as
        `hooks.json_values` makes them) or `why`, what could not be written.
        """
        try:
            return self._made.get(module)
        except TypeError:  # a module that cannot be hashed
            return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, modules of classes that are not torch's are noted; nothing is left in place afterwards."""
        original: Any = nn.Module.__init__
        note: Callable[[nn.Module, FrameType], None] | None = self._note

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if note is not None and not type(module).__module__.startswith("torch."):
                with suppress(Exception):  # a training is never harmed
                    note(module, sys._getframe(1))  # noqa: SLF001 - the constructor that calls this one

        try:
            with replaced(nn.Module, "__init__", init):
                yield
        finally:
            note = None  # whoever has taken hold of ours meanwhile keeps it, and nothing else

    def _note(self, module: nn.Module, frame: FrameType | None) -> None:
        cls = type(module)
        if module in self._made or len(self._made) > _LARGEST:
            return
        outermost = self._outermost(cls, module, frame)
        entry: dict[str, Any] = {"class": class_name(cls), "file": _file_of(cls)}
        if outermost is None:  # it has no __init__ of its own, and takes nothing
            self._made[module] = {**entry, "args": [], "kwargs": {}}
            return
        try:
            args, kwargs = _arguments(outermost)
            entry["args"] = [written(one, self._part) for one in args]
            entry["kwargs"] = {name: written(one, self._part) for name, one in kwargs.items()}
        except NotInertError as error:
            self._made[module] = {"class": entry["class"], "file": entry["file"], "why": str(error)}
            return
        self._made[module] = entry

    def _part(self, value: Any) -> Any:
        """A module that was noted itself is written by what it was made with."""
        if not isinstance(value, nn.Module):
            return None
        made = self.of(value)
        return None if made is None or "why" in made else {"kind": "made", "made": dict(made)}

    def _outermost(self, cls: type, module: nn.Module, frame: FrameType | None) -> FrameType | None:
        """The frame of the `__init__` of the module's own class; of the frames that make it, the last one up."""
        codes = self._codes.get(cls)
        if codes is None:
            inits = (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
            codes = frozenset(code for init in inits if (code := getattr(inspect.unwrap(init), "__code__", None)))
            self._codes[cls] = codes
        found = None
        for _ in range(40):
            if frame is None:
                break
            if frame.f_code in codes and frame.f_code.co_argcount and _first(frame) is module:
                found = frame
            frame = frame.f_back
        return found


def _first(frame: FrameType) -> Any:
    return frame.f_locals.get(frame.f_code.co_varnames[0])


def _arguments(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a constructor was called with, but for `self`, as it stands when the constructor begins."""
    code, here = frame.f_code, frame.f_locals
    names = code.co_varnames
    positional, keywords = code.co_argcount, code.co_kwonlyargcount
    only = code.co_posonlyargcount
    args = [here[name] for name in names[1:only]]
    kwargs = {name: here[name] for name in names[max(only, 1) : positional + keywords] if name in here}
    at = positional + keywords
    if code.co_flags & inspect.CO_VARARGS:
        more = here[names[at]]
        if more:  # what stands before them can then only be given by position
            args = [here[name] for name in names[1:positional]]
            kwargs = {name: here[name] for name in names[positional : positional + keywords]}
        args += more
        at += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs.update(here[names[at]])
    return tuple(args), kwargs


def _file_of(cls: type) -> str | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file if isinstance(file, str) else None
