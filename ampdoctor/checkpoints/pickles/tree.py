"""A saved object after reading: plain containers that hold stored tensors and inert records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampdoctor.checkpoints.pickles.inert import Inert
from ampdoctor.checkpoints.storage.stored import StoredTensor
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.report import Skipped

MAX_DEPTH = 200
"""Maximum nesting of dicts and lists in a checkpoint."""
MAX_NODES = 5_000_000
"""Maximum number of dicts, lists, tensors and plain values; a shared one counts at each of its places, because every
later walk visits each place. An optimizer over 100,000 parameters has about 600,000."""
MAX_TENSORS = 250_000
"""Maximum number of a file's tensors and inert records, counted likewise; no pickle of the allowed length has more."""
MAX_PATH = 4096
"""Maximum number of characters of the path to a value."""
MAX_PATHS = 100_000_000
"""Maximum number of characters of the paths to all tensors: 400 for each of `MAX_TENSORS`."""

Tree = Any
"""Dicts, lists, tuples, plain values, `StoredTensor` or `Skipped` for tensors, and `Inert` for any other object."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved object after reading.

    Attributes:
        tree: The object.
        foreign: Names of classes and functions in it that `torch.load(weights_only=True)` refuses, in order.
    """

    tree: Tree
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Extent:
    """The contents of a container; a shared part counts at each of its places.

    Attributes:
        height: Levels of nesting.
        nodes: Number of places.
        tensors: Number of places of tensors and objects.
        chars: Number of characters of the paths to those, from here.
        longest: Number of characters of the longest path to any place.
    """

    height: int
    nodes: int
    tensors: int
    chars: int
    longest: int


_VALUE = _Extent(0, 1, 0, 0, 0)
_TENSOR = _Extent(0, 1, 1, 0, 0)
_INDEX_CHARS = 7
_SMALL = 4
"""A container with fewer parts is counted anew at each of its places: that is cheaper than to remember it."""


def require_finite_tree(root: Tree, name: str) -> None:
    """Refuse a tree over whose dicts, lists and tuples a walk would not end.

    A pickle of some kilobytes can hold 60 levels of `x = [x, x]`, a list that contains itself, or tensors under names
    of megabytes. Inert records are leaves here: whoever searches one counts for himself (`objects.Search`).

    Raises:
        CheckpointError: A container contains itself.
        LimitExceededError: It is nested too deeply, or has too many places, or their paths are too long.
    """
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
    """Is it a container, other than a small one of plain values?"""
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
    return _TENSOR if isinstance(part, StoredTensor | Skipped | Inert) else _VALUE
