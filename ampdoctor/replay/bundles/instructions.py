"""Converts a program's instructions to trees of JSON, whose `kind` is a class of `hooks.program`, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import torch

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.json_values import (
    NOTHING,
    FindClass,
    NotSerializableError,
    Tree,
    UnreadableTreeError,
    name_of,
    read,
    written,
)
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.hooks.program import (
    Backward,
    Call,
    InputRef,
    Instruction,
    Line,
    Mode,
    Op,
    ParamRef,
    Reference,
    ResultRef,
    references,
    results,
)
from ampdoctor.package import working_folder

_CLASSES: Mapping[str, type] = {cls.__name__: cls for cls in (*get_args(Instruction | Reference), Mode)}
_CUDA = re.compile(r"cuda(:\d+)?")
_END = 2**62
"""Of the whole numbers in an instruction: indices and lines."""


def instruction_out(one: Instruction, state: Callable[[RandomState], int]) -> Tree:
    """Returns an instruction as a tree."""

    def special(value: Any) -> Tree | None:
        if isinstance(value, RandomState):
            return {"kind": "RandomState", "index": state(value)}
        if type(value) not in _CLASSES.values():
            return None
        parts = {field.name: written(getattr(value, field.name), special) for field in fields(value)}
        return {"kind": type(value).__name__, **parts}

    what = f"the call of {one.model or 'the model'}" if isinstance(one, Call) else ""
    if isinstance(one, Op):
        what = name_of(one.function) or ""
        if not what:
            shown = getattr(one.function, "__name__", "a function")
            raise NotSerializableError(f"{shown} of the loop is no function in torch's table")
    try:
        return written(replace(one, line=line_out(one.line)), special)
    except NotSerializableError as error:
        raise NotSerializableError(f"{what} takes {error}") from None


def line_out(line: Line) -> Line:
    """Returns a line of the user's code, its file as in `relative`."""
    return None if line is None else (relative(line[0]), line[1])


def relative(file: str) -> str:
    """Returns the path of a file as the user would type it; unchanged if it is not below the working folder."""
    try:
        return Path(file).resolve().relative_to(working_folder()).as_posix()
    except (ValueError, OSError):
        return file


class InstructionsIn:
    """Reads instructions; each may only use inputs, parameters, buffers, and results of instructions before it."""

    def __init__(self, find: FindClass, states: Sequence[RandomState], given: int, name: str) -> None:
        self._find = find
        self._states = states
        self._given = given
        self._name = name
        self._made: set[int] = set()
        self.held: set[str] = set()  # names of the parameters and buffers that are used

    def all(self, trees: Any) -> tuple[Instruction, ...]:
        """Returns the instructions; raises CheckpointError if one is malformed."""
        try:
            return tuple(map(self._one, trees))
        except UnreadableTreeError as error:
            raise CheckpointError(f"{self._name} cannot be replayed here: it holds {error}.") from None
        except TypeError as error:
            raise CheckpointError(f"{self._name}: the instructions are malformed ({error}).") from None

    def _one(self, tree: Tree) -> Instruction:
        one: Any = self._value(tree)
        if not isinstance(one, Instruction):
            raise UnreadableTreeError("something that is no instruction")
        for reference in references(one):
            if isinstance(reference, ParamRef):
                self.held.add(reference.name)
            elif isinstance(reference, ResultRef) and reference.index not in self._made:
                raise UnreadableTreeError("a tensor that nothing before has made")
            elif isinstance(reference, InputRef) and reference.index >= self._given:
                raise UnreadableTreeError("an input that it does not have")
        self._made.update(made.index for made in results(one))
        return one if not isinstance(one, Op) or torch.cuda.is_available() else _without_gpu(one)

    def _value(self, tree: Tree) -> Any:
        return read(tree, self._find, self._special)

    def _special(self, kind: str, tree: Mapping[str, Any]) -> Any:
        if kind == "RandomState":
            return self._states[tree["index"]] if _fits(tree["index"], int) else NOTHING
        if kind == "device" and not torch.cuda.is_available() and _CUDA.fullmatch(tree["value"]):
            return torch.device("cpu")
        if kind not in _CLASSES:
            return NOTHING
        cls = _CLASSES[kind]
        parts = {name: self._value(tree[name]) for name in _types(cls)}
        wrong = next((name for name, hint in _types(cls).items() if not _fits(parts[name], hint)), None)
        if wrong is not None:
            raise UnreadableTreeError(f"a malformed {kind} ({wrong})")
        made = cls(**parts)
        if isinstance(made, Mode) and made.autocast is not None and made.autocast[0] not in ("cpu", "cuda"):
            raise UnreadableTreeError("an autocast for another device")
        if isinstance(made, Backward) and (len(made.seeds) != len(made.roots) or not made.roots):
            raise UnreadableTreeError("a backward from nothing")
        if isinstance(made, Op) and name_of(made.function) is None:
            raise UnreadableTreeError("an op that is no function of torch's")
        return made


@cache
def _types(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, localns={"RandomState": RandomState, "torch": torch})


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is tuple:
        each = parts[:1] * len(value) if parts[1:] == (...,) and type(value) is tuple else parts
        return type(value) is tuple and len(value) == len(each) and all(map(_fits, value, each))
    if kind is Mapping:
        return type(value) is dict and all(_fits(key, parts[0]) and _fits(one, parts[1]) for key, one in value.items())
    if kind is Callable:
        return callable(value)
    if hint is int:
        return type(value) is int and 0 <= value < _END
    if hint is float:
        return type(value) in (int, float)
    return hint is Any or (type(value) is hint and not (hint is str and "\0" in value))


def _without_gpu(one: Op) -> Op:
    if one.function == torch.Tensor.cuda:
        return replace(one, function=torch.Tensor.to, args=(*one.args[:1], "cpu"), kwargs={})
    kwargs = {name: _here(value) for name, value in one.kwargs.items()}
    return replace(one, args=tuple(map(_here, one.args)), kwargs=kwargs)


def _here(value: Any) -> Any:
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


def line_in(line: Any) -> Line:
    """Returns a file and a line number of the manifest; raises ValueError if they are malformed."""
    found = tuple(line) if isinstance(line, list) else line
    if not _fits(found, Line):
        raise ValueError("line")
    return cast("Line", found)
