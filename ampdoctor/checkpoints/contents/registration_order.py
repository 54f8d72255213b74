"""Names an optimizer's numbered parameters if the weights were saved in another order (safetensors sorts them).

An optimizer over `model.parameters()` numbers them as `named_parameters()` walks: a module's own parameters, then child
after child, each child completely. The order in which children were registered is not saved, but little freedom is
left: numbered names (`layers.0`, `ln_1`) were registered in that order, `weight` before `bias`, and the shapes must
fit. This file computes, over all arrangements that fit, where each parameter can stand. Only a parameter with a single
place has its number for certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_Shape = tuple[int, ...]

MAX_ARRANGEMENTS = 50_000
"""Most partial arrangements of children that are tried, over all modules; a dozen children in any order have 4,096."""

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")
_LEAF_ORDER = ("weight", "bias")


class _TooManyError(Exception):
    """More arrangements than `MAX_ARRANGEMENTS`."""


@dataclass(slots=True)
class _Node:
    """A module, or a parameter (which has no children).

    Attributes:
        name: Full name.
        shape: A parameter's shape.
        own: A module's own parameters.
        modules: Its children.
        size: Number of parameters in it.
    """

    name: str
    shape: _Shape | None = None
    own: dict[str, _Node] = field(default_factory=dict)
    modules: dict[str, _Node] = field(default_factory=dict)
    size: int = 0


def place_names(weights: Sequence[tuple[str, _Shape]], shapes: Sequence[_Shape | None]) -> dict[int, str] | None:
    """Maps places in the optimizer's sequence to the parameters that stand there, for every place that is certain.

    Args:
        weights: Names and shapes of the parameters, in any order.
        shapes: The optimizer's sequence of shapes; None for an unknown one.

    Returns:
        The names; None if no arrangement fits, because the optimizer holds other parameters.
    """
    if len(weights) != len(shapes):
        return None
    try:
        return _Search(shapes).run(_tree(weights))
    except _TooManyError:
        return {}


def _tree(weights: Sequence[tuple[str, _Shape]]) -> _Node:
    root = _Node("")
    for name, shape in weights:
        node = root
        node.size += 1
        *owners, entry = name.split(".")
        for owner in owners:
            node = node.modules.setdefault(owner, _Node(f"{node.name}.{owner}" if node.name else owner))
            node.size += 1
        node.own[entry] = _Node(name, shape, size=1)
    return root


class _Search:
    """Searches the arrangements of a tree that fit a sequence of shapes."""

    def __init__(self, shapes: Sequence[_Shape | None]) -> None:
        self._shapes = shapes
        self._fits: dict[tuple[int, int], bool] = {}
        self._looked_at = 0

    def run(self, root: _Node) -> dict[int, str] | None:
        if not self._fit(root, 0):
            return None
        places: dict[str, set[int]] = {}
        seen: set[tuple[int, int]] = set()
        pending = [(root, 0)]
        while pending:
            node, at = pending.pop()
            if (id(node), at) in seen:
                continue
            seen.add((id(node), at))
            if node.shape is not None:
                places.setdefault(node.name, set()).add(at)
                continue
            pending.extend(self._possible(node, at))
        return {min(where): name for name, where in places.items() if len(where) == 1}

    def _fit(self, node: _Node, at: int) -> bool:
        if node.shape is not None:
            return self._shapes[at] in {None, node.shape}
        key = (id(node), at)
        if key not in self._fits:
            self._fits[key] = any(True for _ in self._possible(node, at)) or not node.size
        return self._fits[key]

    def _possible(self, node: _Node, at: int) -> list[tuple[_Node, int]]:
        """Returns every child with every place that it has in some fitting arrangement of the node."""
        found: list[tuple[_Node, int]] = []
        for children in (node.own, node.modules):
            nodes = list(children.values())
            before = _predecessors(list(children))
            placed = self._arrange(nodes, before, at)
            if placed is None:
                return []
            found += placed
            at += sum(child.size for child in nodes)
        return found

    def _arrange(self, nodes: list[_Node], before: Mapping[int, int], at: int) -> list[tuple[_Node, int]] | None:
        """Go forwards over sets of children that can stand first, then backwards over those that can be completed."""
        full = (1 << len(nodes)) - 1
        steps: list[dict[int, list[tuple[int, int]]]] = [{0: []}]
        for _ in nodes:
            following: dict[int, list[tuple[int, int]]] = {}
            for chosen in steps[-1]:
                start = at + sum(n.size for i, n in enumerate(nodes) if chosen >> i & 1)
                for index in _open(len(nodes), chosen, before):
                    self._looked_at += 1
                    if self._looked_at > MAX_ARRANGEMENTS:
                        raise _TooManyError
                    if self._fit(nodes[index], start):
                        following.setdefault(chosen | 1 << index, []).append((index, start))
            steps.append(following)
        if nodes and full not in steps[-1]:
            return None
        alive, found = {full}, set()
        for step in reversed(steps[1:]):
            arrived = [(chosen, index, start) for chosen in alive for index, start in step.get(chosen, [])]
            found |= {(index, start) for _, index, start in arrived}
            alive = {chosen & ~(1 << index) for chosen, index, _ in arrived}
        return [(nodes[index], start) for index, start in found]


def _open(count: int, chosen: int, before: Mapping[int, int]) -> Iterator[int]:
    """Yields the children that can stand next."""
    for index in range(count):
        if not chosen >> index & 1 and (index not in before or chosen >> before[index] & 1):
            yield index


def _predecessors(names: list[str]) -> dict[int, int]:
    """Maps each child to the one that was registered before it, if their names tell."""
    chains: dict[str, list[tuple[int, int]]] = {}
    for index, name in enumerate(names):
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            chains.setdefault(match["stem"], []).append((int(match["number"]), index))
        elif name in _LEAF_ORDER:
            chains.setdefault(" ", []).append((_LEAF_ORDER.index(name), index))
    before: dict[int, int] = {}
    for chain in chains.values():
        ordered = [index for _, index in sorted(chain)]
        before.update(zip(ordered[1:], ordered[:-1], strict=True))
    return before
