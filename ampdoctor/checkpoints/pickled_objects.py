"""The tree of objects from a pickle: checked for its size, and searched for modules and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.checkpoints.stored_tensor import StoredTensor
from ampdoctor.checkpoints.unpickler import GlobalName, OpaqueKey, PickledObject
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.report import Skipped

MAX_DEPTH = 200
"""Maximum nesting of dicts and lists in a checkpoint."""
MAX_NODES = 5_000_000
"""Values in a checkpoint, each at each of its places: an optimizer over 100,000 parameters has about 600,000."""
MAX_TENSORS = 250_000
"""Maximum number of a file's tensors and inert records, counted likewise; no pickle of the allowed length has more."""
MAX_PATH = 4096
"""Maximum number of characters of the path to a value."""
MAX_PATHS = 100_000_000
"""Maximum number of characters of the paths to all tensors: 400 for each of `MAX_TENSORS`."""

Tree = Any
"""Dicts, lists, tuples, plain values, `StoredTensor` or `Skipped` for tensors, `PickledObject` for any other object."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved object; `unsafe_globals` are the names in it that `torch.load(weights_only=True)` refuses, in order."""

    tree: Tree
    unsafe_globals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Extent:
    """The size of a container; a shared part counts at each of its places."""

    height: int  # levels of nesting
    nodes: int  # number of places
    tensors: int  # number of places of tensors and objects
    chars: int  # characters of the paths to those, from here
    longest: int  # characters of the longest path to any place


_VALUE = _Extent(0, 1, 0, 0, 0)
_TENSOR = _Extent(0, 1, 1, 0, 0)
_INDEX_CHARS = 7
_SMALL = 4
"""A smaller container is counted again at each of its places: that is cheaper than a table."""


def require_finite_tree(root: Tree, name: str) -> None:
    """Refuse a tree that is too deep or large for a walk, or contains itself: a kilobyte holds 60 of `[x, x]`."""
    known: dict[int, _Extent] = {}
    open_: set[int] = set()
    stack: list[Any] = [root] if _is_nest(root) else []
    while stack:
        node = stack[-1]
        if id(node) in known:
            stack.pop()
            continue
        parts = node.values() if isinstance(node, dict) else node
        if id(node) not in open_:
            open_.add(id(node))
            if len(open_) > MAX_DEPTH:
                raise LimitExceededError(f"{name}: nesting", MAX_DEPTH, len(open_))
            nests = [part for part in parts if _is_nest(part) and id(part) not in known]
            if any(id(part) in open_ for part in nests):
                raise CheckpointError(f"{name} is refused: a container in it contains itself.")
            stack.extend(nests)
            continue
        stack.pop()
        open_.discard(id(node))
        known[id(node)] = _measured(node, known, name)


def _is_nest(node: Any) -> bool:
    """Whether it is a container, other than a small one of plain values."""
    if not isinstance(node, dict | list | tuple):
        return False
    parts = node.values() if isinstance(node, dict) else node
    return len(node) > _SMALL or any(isinstance(part, dict | list | tuple) for part in parts)


def _measured(node: dict[Any, Any] | list[Any] | tuple[Any, ...], known: dict[int, _Extent], name: str) -> _Extent:
    height = tensors = chars = longest = 0
    nodes = 1
    for key, part in node.items() if isinstance(node, dict) else ((None, part) for part in node):
        below = _extent(part, known, name)
        step = 1 + (len(key) if isinstance(key, str) else _INDEX_CHARS)
        height = max(height, below.height)
        nodes += below.nodes
        tensors += below.tensors
        chars += below.chars + below.tensors * step
        longest = max(longest, below.longest + step)
    for what, limit, actual in (
        ("nesting", MAX_DEPTH, height + 1),
        ("values", MAX_NODES, nodes),
        ("tensors and objects", MAX_TENSORS, tensors),
        ("characters of a path", MAX_PATH, longest),
        ("characters of the paths to tensors", MAX_PATHS, chars),
    ):
        if actual > limit:
            raise LimitExceededError(f"{name}: {what}", limit, actual)
    return _Extent(height + 1, nodes, tensors, chars, longest)


def _extent(part: Any, known: dict[int, _Extent], name: str) -> _Extent:
    if isinstance(part, dict | list | tuple):
        return known.get(id(part)) or _measured(part, known, name)
    return _TENSOR if isinstance(part, StoredTensor | Skipped | PickledObject) else _VALUE


# -- inert records: whole modules saved with `torch.save(model)`, and tensors held by objects of any class --

MAX_SEARCHED = 1_000_000
"""Maximum number of values inside a file's objects: a module of 20,000 submodules has about 600,000."""
_TOO_DEEP = "an object nested more deeply than a checkpoint's is not searched"

_NUMPY_RECONSTRUCT = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
_NUMPY_FROM_BUFFER = frozenset({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})
_NUMPY_DTYPE = re.compile(r"[fciub]\d{1,2}")
"""Dtypes of numbers; arrays of objects, texts and records are not built."""


@dataclass(slots=True)
class ModuleContent:
    """A whole `nn.Module` that was pickled: `tensors` by the names of `state_dict()`, in its order."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()  # names in `tensors`
    skipped: list[Skipped] = field(default_factory=list)  # tensors that are not read


@dataclass(slots=True)
class Search:
    """The work of searching one file's objects so far; a shared object is searched at each of its places."""

    places: int = 0  # visited values
    tensors: int = 0  # tensors found
    chars: int = 0  # characters of the paths to them

    def look(self, places: int, path: str, tensors: int = 0) -> None:
        """Count what is visited next; raises LimitExceededError if it is more than a checkpoint needs."""
        self.places += places
        self.tensors += tensors
        self.chars += places * len(path)
        for what, limit, actual in (
            ("values inside pickled objects", MAX_SEARCHED, self.places),
            ("tensors inside pickled objects", MAX_TENSORS, self.tensors),
            ("characters of the paths inside pickled objects", MAX_PATHS, self.chars),
        ):
            if actual > limit:
                raise LimitExceededError(what, limit, actual)


def is_module(node: Any) -> bool:
    """Whether a record is that of an `nn.Module`, whatever its class."""
    state = node.state if isinstance(node, PickledObject) else None
    return isinstance(state, dict) and all(
        isinstance(state.get(key), dict) for key in ("_parameters", "_buffers", "_modules")
    )


def read_module(root: PickledObject, search: Search) -> ModuleContent:
    """Returns the tensors of a pickled module and its children; a module held twice counts at its first place."""
    content = ModuleContent()
    buffers: set[str] = set()
    seen: set[int] = set()
    pending: list[tuple[PickledObject, str, int]] = [(root, "", 0)]
    while pending:
        module, prefix, depth = pending.pop()
        if id(module) in seen or not is_module(module):
            continue
        if depth > MAX_DEPTH:
            content.skipped.append(Skipped(what=prefix.rstrip("."), reason=_TOO_DEEP, kind="unread"))
            continue
        seen.add(id(module))
        for kind in ("_parameters", "_buffers"):
            search.look(1 + len(module.state[kind]), prefix, len(module.state[kind]))
            for key, tensor in module.state[kind].items():
                name = f"{prefix}{_word(key)}"
                if isinstance(tensor, StoredTensor):
                    content.tensors[name] = tensor
                    if kind == "_buffers":
                        buffers.add(name)
                elif isinstance(tensor, Skipped):
                    content.skipped.append(replace(tensor, what=name))
        search.look(len(module.state["_modules"]), prefix)
        children = [
            (m, f"{prefix}{_word(key)}.", depth + 1)
            for key, m in module.state["_modules"].items()
            if isinstance(m, PickledObject)
        ]
        pending.extend(reversed(children))
    content.buffers = frozenset(buffers)
    return content


def tensors_inside(root: PickledObject, search: Search) -> Iterator[tuple[str, StoredTensor | Skipped]]:
    """Yields every tensor in an object once, with a dotted path; NumPy arrays come as `Skipped` (`numpy_array`)."""
    seen: set[int] = set()
    pending: list[tuple[Any, str, int]] = [(root, "", 0)]
    while pending:
        node, path, depth = pending.pop()
        if isinstance(node, StoredTensor | Skipped):
            search.look(0, "", 1)
            yield path, node
            continue
        if not isinstance(node, dict | list | tuple | PickledObject) or id(node) in seen:
            continue
        if depth > MAX_DEPTH:
            yield path, Skipped(what="", reason=_TOO_DEEP, kind="unread")
            continue
        seen.add(id(node))
        if isinstance(node, PickledObject) and node.name in _NUMPY_RECONSTRUCT | _NUMPY_FROM_BUFFER:
            if numpy_array(node) is not None:
                yield path, Skipped(what="", reason="a NumPy array, of which only NaN and Inf are looked for")
            else:
                yield path, Skipped(what="", reason="a NumPy array of another kind than numbers is not read")
            continue
        parts = [(part, f"{path}.{key}" if path else key, depth + 1) for key, part in _searched(node, path, search)]
        pending.extend(reversed(parts))


def numpy_array(node: PickledObject) -> NDArray[Any] | None:
    """Returns a pickled NumPy array of numbers, flat, in the order of its bytes; None for any other record."""
    raw: Any = None
    dtype: Any = None
    if node.name in _NUMPY_RECONSTRUCT and isinstance(node.state, tuple) and len(node.state) == 5:
        dtype, raw = node.state[2], node.state[4]
    elif node.name in _NUMPY_FROM_BUFFER and len(node.args) > 1:
        raw, dtype = node.args[:2]
    if (
        not isinstance(raw, bytes)
        or not isinstance(dtype, PickledObject)
        or dtype.name != "numpy.dtype"
        or not dtype.args
    ):
        return None
    big = isinstance(dtype.state, tuple) and len(dtype.state) > 1 and dtype.state[1] == ">"
    if not isinstance(dtype.args[0], str) or _NUMPY_DTYPE.fullmatch(dtype.args[0]) is None:
        return None
    try:
        return np.frombuffer(raw, dtype=f"{'>' if big else '<'}{dtype.args[0]}")
    except (TypeError, ValueError):  # no such width, or incomplete elements
        return None


def optimizer_fields(node: PickledObject, search: Search) -> dict[str, Any] | None:
    """Returns the state dict of an optimizer that was pickled as an object, parameters numbered; None for others."""
    fields = fields_of(node)
    state, groups = fields.get("state"), fields.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list) or not all(_is_group(g) for g in groups):
        return None
    search.look(sum(_places(entries) for entries in (*state.values(), *groups)) + 1, "")
    if not all(isinstance(entries, dict) and all(map(_is_flat, entries.values())) for entries in state.values()):
        return None
    numbers: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    keys = [id(key.value) if isinstance(key, OpaqueKey) else 0 for key in state]
    if not all(key in numbers for key in keys):
        return None
    return {
        "state": {numbers[key]: value for key, value in zip(keys, state.values(), strict=True)},
        "param_groups": [{**g, "params": [numbers[id(parameter)] for parameter in g["params"]]} for g in groups],
    }


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list) and all(map(_is_flat, group.values()))


def _is_flat(value: Any) -> bool:
    """Whether it is no container, or a container without containers in it."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return not any(isinstance(part, dict | list | tuple) for part in parts)


def _places(entries: Any) -> int:
    """Returns the number of values in a parameter's state or a group; a shared value counts at each of its places."""
    if not isinstance(entries, dict):
        return 1
    return sum(len(v) if isinstance(v, dict | list | tuple) else 1 for v in entries.values())


def fields_of(node: Any) -> dict[Any, Any]:
    """Returns a record's attributes: its state, including that of `__slots__`; {} for anything else."""
    state = node.state if isinstance(node, PickledObject) else None
    if isinstance(state, tuple) and len(state) == 2:
        return {**(state[0] if isinstance(state[0], dict) else {}), **(state[1] if isinstance(state[1], dict) else {})}
    return state if isinstance(state, dict) else {}


def _searched(node: Any, path: str, search: Search) -> Iterator[tuple[str, Any]]:
    """Yields the parts that may hold a tensor; all parts count."""
    for key, part in parts_of(node):
        search.look(1, "")
        if isinstance(part, StoredTensor | Skipped | dict | list | tuple | PickledObject):
            search.look(1, path)
            search.look(1, key)
            yield key, part


def parts_of(node: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a record or a container, with a word for each."""
    if isinstance(node, PickledObject):
        yield from parts_of(fields_of(node) or [node.state])
        yield from parts_of(node.args)
        yield from parts_of(node.items)
        for key, value in node.pairs:
            yield _word(key), value
    elif isinstance(node, dict):
        for key, value in node.items():
            yield _word(key), value
    else:
        for index, value in enumerate(node):
            yield str(index), value


def _word(key: Any) -> str:
    if isinstance(key, GlobalName | PickledObject):
        return key.name.rpartition(".")[2]
    return str(key) if isinstance(key, str | int | float | bool) or key is None else type(key).__name__
