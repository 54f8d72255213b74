"""Which module outputs flow into which: read off autograd's graph while the forward runs, without touching a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Flow:
    """Numbers outputs as they are made, and keeps for each those that it comes from.

    Where autograd records nothing (a frozen part, a forward under `no_grad`), an output counts as coming from all
    before it, and as handed on to all after it: the order of execution is all that is known there.

    Attributes:
        ancestors: For each output the earlier ones that it comes from, at whatever distance, as a bit mask.
        parents: Those of them from which it comes on a path past no other.
    """

    def __init__(self) -> None:
        self.ancestors: list[int] = []
        self.parents: list[int] = []
        self._known: dict[Any, tuple[int, int]] = {}
        self._made: set[tuple[Any, int]] = set()
        self._unrecorded = 0

    def has(self, tensor: Tensor) -> bool:
        """This tensor is (of) an output that was noted, and nothing was done to it since."""
        return (tensor.grad_fn, tensor.output_nr) in self._made

    def add(self, tensors: Sequence[Tensor]) -> int:
        """Note an output; returns its number."""
        number = len(self.ancestors)
        bit = 1 << number
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        ancestors, parents = self._unrecorded, 0
        for node in nodes:
            far, near = self._behind(node)
            ancestors |= far
            parents |= near
        if not nodes:
            ancestors, parents = bit - 1, bit >> 1
            self._unrecorded = bit | (bit - 1)
        elif not parents and self._unrecorded:
            parents = 1 << (self._unrecorded.bit_length() - 1)
        self.ancestors.append(ancestors)
        self.parents.append(parents)
        for node in nodes:
            self._known[node] = (ancestors | bit, bit)
        self._made |= {(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.grad_fn is not None}
        return number

    def forget_graph(self) -> None:
        """Let go of autograd's nodes."""
        self._known.clear()
        self._made.clear()

    def _behind(self, start: Any) -> tuple[int, int]:
        """(outputs that flow into a node, those that do so past no other); each node is looked at once."""
        todo = [start]
        while todo:
            node = todo[-1]
            if node in self._known:
                todo.pop()
                continue
            inputs = [following for following, _ in node.next_functions if following is not None]
            waiting = [following for following in inputs if following not in self._known]
            if waiting:
                todo += waiting
                continue
            far = near = 0
            for following in inputs:
                beyond, next_to = self._known[following]
                far |= beyond
                near |= next_to
            self._known[node] = far, near
            todo.pop()
        return self._known[start]
