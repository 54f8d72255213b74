"""Converts a program's instructions to trees of JSON, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.json_values import (
    NOTHING,
    FindClass,
    NotSerializableError,
    Tree,
    UnreadableTreeError,
    function_named,
    name_of,
    read,
    written,
)
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    InputRef,
    Instruction,
    Line,
    Mode,
    Op,
    ParamRef,
    Reference,
    ResultRef,
    Scaled,
    Unscaled,
)

_KINDS = ("cpu", "cuda")
_CUDA = re.compile(r"cuda(:\d+)?")


def instruction_out(one: Instruction, state: Callable[[RandomState], int], base: Path) -> Tree:
    """Returns an instruction as a tree.

    `state` returns the index of a random state's entry; files below `base` get relative paths. Raises NotInertError if
    an argument has no JSON form.
    """
    line = None if one.line is None else [relative(one.line[0], base), one.line[1]]
    match one:
        case Call():
            said = {"kind": "call", "model": one.model, "training": one.training}
            what = f"the call of {one.model or 'the model'}"
            return {**said, **_called_out(one, what, state), "line": line}
        case Op():
            name = name_of(one.function)
            if name is None:
                shown = getattr(one.function, "__name__", "a function")
                raise NotSerializableError(f"{shown} of the loop is no function in torch's table")
            return {"kind": "op", "function": name, **_called_out(one, name, state), "line": line}
        case Scaled():
            made = {"loss": _reference(one.loss), "result": one.result.index}
            return {"kind": "scaled", **made, "line": line}
        case Backward():
            return {
                "kind": "backward",
                "roots": [_reference(root) for root in one.roots],
                "seeds": [None if seed is None else _reference(seed) for seed in one.seeds],
                "inputs": [_reference(tensor) for tensor in one.inputs],
                "kept": one.kept,
                "mode": _mode_out(one.mode),
                "line": line,
            }
        case Unscaled():
            return {"kind": "unscaled", "line": line}
        case Ended():
            return {"kind": "ended", "value": _reference(one.value), "line": line}
        case Clipped():
            norms = {"max_norm": written(float(one.max_norm)), "norm_type": written(float(one.norm_type))}
            parameters = [_reference(parameter) for parameter in one.parameters]
            return {"kind": "clipped", "parameters": parameters, **norms, "line": line}


def _called_out(one: Call | Op, what: str, state: Callable[[RandomState], int]) -> dict[str, Tree]:
    try:
        args = [written(value, _reference) for value in one.args]
        kwargs = {name: written(value, _reference) for name, value in one.kwargs.items()}
    except NotSerializableError as error:
        raise NotSerializableError(f"{what} takes {error}") from None
    return {
        "args": args,
        "kwargs": kwargs,
        "results": {path: made.index for path, made in one.results.items()},
        "mode": _mode_out(one.mode),
        "random": None if one.random is None else state(one.random),
    }


def _mode_out(mode: Mode) -> Tree:
    cast = None if mode.autocast is None else [mode.autocast[0], str(mode.autocast[1])]
    return {"autocast": cast, "cached": mode.cached, "gradients": mode.gradients}


def _reference(value: Any) -> Tree | None:
    if isinstance(value, InputRef):
        return {"kind": "given", "index": value.index}
    if isinstance(value, ParamRef):
        return {"kind": "held", "name": value.name}
    return {"kind": "made", "index": value.index} if isinstance(value, ResultRef) else None


def relative(file: str, base: Path) -> str:
    """Returns the path of a file relative to `base`; unchanged if it is not below it."""
    try:
        return Path(file).resolve().relative_to(base).as_posix()
    except (ValueError, OSError):
        return file


class InstructionsIn:
    """Reads instructions; each may only use inputs, parameters, buffers, and results of instructions before it.

    `find` finds classes of values, `given` is the number of input tensors, `name` is the manifest's file for errors.
    """

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
            return tuple(self._one(tree) for tree in trees)
        except UnreadableTreeError as error:
            raise CheckpointError(f"{self._name} cannot be replayed here: it holds {error}.") from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{self._name}: an instruction is malformed ({type(error).__name__}).") from None

    def _one(self, tree: Mapping[str, Any]) -> Instruction:
        kind, line = tree["kind"], line_in(tree["line"])
        if kind in ("call", "op"):
            return self._called(tree, line)
        if kind == "scaled":
            loss = self._reference(tree["loss"])
            return Scaled(loss=loss, result=self._make(tree["result"]), line=line)
        if kind == "backward":
            seeds = tuple(None if seed is None else self._reference(seed) for seed in tree["seeds"])
            roots = tuple(map(self._reference, tree["roots"]))
            if len(seeds) != len(roots) or not roots:
                raise ValueError("seeds")
            inputs = tuple(map(self._reference, tree["inputs"]))
            mode = _mode(tree["mode"])
            return Backward(roots=roots, seeds=seeds, inputs=inputs, kept=tree["kept"] is True, mode=mode, line=line)
        if kind == "unscaled":
            return Unscaled(line=line)
        if kind == "ended":
            return Ended(value=self._reference(tree["value"]), line=line)
        if kind == "clipped":
            norms = (float(self._value(tree[name])) for name in ("max_norm", "norm_type"))
            named = [self._reference(parameter) for parameter in tree["parameters"]]
            parameters = tuple(parameter for parameter in named if isinstance(parameter, ParamRef))
            if len(parameters) != len(named):
                raise ValueError("parameters")
            return Clipped(parameters=parameters, max_norm=next(norms), norm_type=next(norms), line=line)
        raise ValueError("kind")

    def _called(self, tree: Mapping[str, Any], line: Line) -> Call | Op:
        function, args, kwargs = tree.get("function"), tree["args"], tree["kwargs"]
        if tree["kind"] == "op" and not torch.cuda.is_available():
            args, kwargs = [_here(one) for one in args], {name: _here(one) for name, one in kwargs.items()}
            if function == "torch.Tensor.cuda":
                function, args, kwargs = "torch.Tensor.to", [args[0], "cpu"], {}
        args = tuple(map(self._value, args))
        kwargs = {_string(name): self._value(one) for name, one in kwargs.items()}
        mode = _mode(tree["mode"])
        random = None if tree["random"] is None else self._states[_index(tree["random"], len(self._states))]
        results = {path: self._make(index) for path, index in tree["results"].items()}
        said: dict[str, Any] = {"args": args, "kwargs": kwargs, "results": results, "mode": mode, "line": line}
        if tree["kind"] == "op":
            found = function_named(_string(function))
            if found is None:
                raise UnreadableTreeError(f"{str(function)[:80]!r}, which is no function in torch's table")
            return Op(function=found, random=random, **said)
        if random is None:
            raise ValueError("random")
        return Call(model=_string(tree["model"]), training=tree["training"] is True, random=random, **said)

    def _value(self, tree: Tree) -> Any:
        return read(tree, self._find, self._special)

    def _special(self, kind: str, tree: Mapping[str, Any]) -> Any:
        if kind == "given":
            return InputRef(_index(tree["index"], self._given))
        if kind == "held":
            self.held.add(_string(tree["name"]))
            return ParamRef(tree["name"])
        if kind == "device" and not torch.cuda.is_available() and _CUDA.fullmatch(tree["value"]):
            return torch.device("cpu")
        if kind == "made":
            if tree["index"] not in self._made:
                raise UnreadableTreeError("a tensor that nothing before has made")
            return ResultRef(tree["index"])
        return NOTHING

    def _reference(self, tree: Mapping[str, Any]) -> Reference:
        found = self._special(tree["kind"], tree)
        if not isinstance(found, InputRef | ParamRef | ResultRef):
            raise TypeError("reference")
        return found

    def _make(self, index: Any) -> ResultRef:
        self._made.add(_index(index, 2**62))
        return ResultRef(index)


def _mode(tree: Mapping[str, Any]) -> Mode:
    cast = tree["autocast"]
    if cast is not None:
        kind, dtype = cast[0], getattr(torch, str(cast[1]).removeprefix("torch."))
        if kind not in _KINDS or not isinstance(dtype, torch.dtype) or len(cast) != 2:
            raise ValueError("autocast")
        cast = kind, dtype
    return Mode(autocast=cast, cached=tree["cached"] is True, gradients=tree["gradients"] is True)


def _here(tree: Tree) -> Tree:
    """Replaces the name of a GPU by "cpu"."""
    return "cpu" if isinstance(tree, str) and _CUDA.fullmatch(tree) else tree


def line_in(line: Any) -> Line:
    """Returns a file and a line number of the manifest."""
    return None if line is None else (_string(line[0]), _index(line[1], 2**31))


def _index(value: Any, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError("index")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("string")
    return value
