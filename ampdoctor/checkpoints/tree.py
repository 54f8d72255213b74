"""What a saved object is once read: plain containers, with stored tensors and inert records in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ampdoctor.errors import CheckpointError, LimitExceededError

MAX_DEPTH = 200
"""Nesting of dicts and lists inside a checkpoint."""
MAX_NODES = 5_000_000
"""Dicts, lists, tensors and plain values of a checkpoint, what is shared counted at each of its places: so many are
visited by every later walk. An optimizer over 100,000 parameters has about 600,000."""

Tree = Any
"""Dicts, lists, tuples, plain values, `StoredTensor` or `Skipped` for tensors, and `Inert` for any other object."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved object as it was read.

    Attributes:
        tree: The object.
        foreign: Names of classes and functions in it that `torch.load(weights_only=True)` refuses, in order.
    """

    tree: Tree
    foreign: tuple[str, ...] = ()


def require_finite_tree(root: Tree, name: str) -> None:
    """Refuse a tree that a walk over its dicts, lists and tuples would not come to the end of.

    A pickle of some kilobytes can hold 60 levels of `x = [x, x]`, or a list that contains itself. Inert records are
    leaves here: whoever looks into one keeps count himself.

    Raises:
        CheckpointError: A container contains itself.
        LimitExceededError: It is nested too deeply, or has too many places.
    """
    done: dict[int, tuple[int, int]] = {}
    open_: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, finished = stack.pop()
        if not isinstance(node, dict | list | tuple) or id(node) in done:
            continue
        parts = list(node.values()) if isinstance(node, dict) else node
        if not finished:
            if id(node) in open_:
                raise CheckpointError(f"{name} is refused: a container in it contains itself.")
            open_.add(id(node))
            stack.append((node, True))
            stack.extend((part, False) for part in parts)
            continue
        open_.discard(id(node))
        known = [done.get(id(part), (0, 1)) for part in parts if isinstance(part, dict | list | tuple)]
        height = 1 + max((h for h, _ in known), default=0)
        nodes = 1 + len(parts) - len(known) + sum(n for _, n in known)
        if height > MAX_DEPTH:
            raise LimitExceededError(f"{name}: nesting", MAX_DEPTH, height)
        if nodes > MAX_NODES:
            raise LimitExceededError(f"{name}: values", MAX_NODES, nodes)
        done[id(node)] = height, nodes
