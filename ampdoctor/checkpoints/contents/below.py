"""Tells what lies below the containers of a saved tree, once for each container, however many places share it.

A tuple of 20,000 numbers costs a file 40 kB and can stand in 200 places for 1 kB more. A walk that enters it at each
place takes seconds and finds nothing. Trees are finite and at most `MAX_DEPTH` deep (`require_finite_tree`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ampdoctor.checkpoints.contents.scalers import scaler_fields
from ampdoctor.checkpoints.pickles.inert import Inert
from ampdoctor.checkpoints.pickles.objects import is_module
from ampdoctor.checkpoints.storage.stored import StoredTensor
from ampdoctor.evidence.report import Skipped

_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})
"""Types that are never part of a checkpoint. The type alone decides, because there are millions of such values."""


def is_optimizer(node: Any) -> bool:
    """Is a mapping an optimizer's state dict?"""
    return (
        isinstance(node, Mapping)
        and isinstance(node.get("param_groups"), list | tuple)
        and isinstance(node.get("state"), Mapping)
    )


def entries_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a container's keys or positions, with the values that may be or hold a part of a checkpoint."""
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node)
    return ((key, value) for key, value in pairs if type(value) not in _PLAIN)


class Below:
    """Answers about the nodes of one tree; containers are known by their address, so the tree has to outlive it."""

    def __init__(self) -> None:
        self._tensors: dict[int, bool] = {}
        self._parts: dict[int, bool] = {}

    def tensor(self, node: Any) -> bool:
        """Does a tensor or a whole module lie there?

        The answers are kept: asked at every level of a nest, a search would otherwise take the square of its size.
        """
        if isinstance(node, StoredTensor | Skipped) or is_module(node):
            return True
        if not isinstance(node, Mapping | list | tuple):
            return False
        if id(node) not in self._tensors:
            self._tensors[id(node)] = any(self.tensor(value) for _, value in entries_of(node))
        return self._tensors[id(node)]

    def part(self, node: Any) -> bool:
        """Does any reported part lie there: a tensor, an object, an optimizer, a scaler?"""
        if type(node) in _PLAIN:
            return False
        if isinstance(node, StoredTensor | Skipped | Inert):
            return True
        if not isinstance(node, Mapping | list | tuple):
            return False
        if id(node) not in self._parts:
            itself = is_optimizer(node) or (isinstance(node, Mapping) and scaler_fields(node) is not None)
            self._parts[id(node)] = itself or any(self.part(value) for _, value in entries_of(node))
        return self._parts[id(node)]


def leaves(node: Any, path: str, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yields every value of these kinds in a tree, with its dotted path, in stored order."""
    return _leaves(node, path, kinds, set())


def _leaves(node: Any, path: str, kinds: tuple[type, ...], barren: set[int]) -> Iterator[tuple[str, Any]]:
    """Do the same; `barren` holds the addresses of containers in which nothing was found."""
    if isinstance(node, kinds):
        yield path, node
    elif isinstance(node, Mapping | list | tuple) and id(node) not in barren:
        nothing = True
        for key, value in entries_of(node):
            if id(value) in barren:
                continue
            for found in _leaves(value, join(path, key), kinds, barren):
                nothing = False
                yield found
        if nothing:
            barren.add(id(node))


def join(path: str, key: object) -> str:
    """Returns the path of an entry."""
    text = str(key) if isinstance(key, str | int | float | bool) or key is None else type(key).__name__
    return f"{path}.{text}" if path else text
