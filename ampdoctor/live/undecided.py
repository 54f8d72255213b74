"""Backwards that spread what is not finite: no harm is done before the loop uses it, and it may leave that step out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ampdoctor.evidence.of_runs.trace import Birth
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.probes.trace.taint import NONE, Births


@dataclass(slots=True, kw_only=True)
class Spread:
    """What one backward spread.

    Attributes:
        what: What of it was not finite, in words.
        births: Why, worst first.
        origins: How the trace numbers, in this step, those and what its gradients descend from.
        curable: A lower loss scale may take it away.
        leaves: The tensors whose gradients it is.
        gradients: Where it has put them, by `id` of the leaf; nothing where it handed them out. None while it runs.
        passed_over: A step was taken since, and did not use them.
    """

    what: str
    births: tuple[Birth, ...]
    origins: Births = NONE
    curable: bool = False
    leaves: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] | None = None
    passed_over: bool = False
    _zero: frozenset[int] = frozenset()  # the leaves whose gradients were so before anybody cleared them

    def over(self, *, accumulated: bool) -> None:
        """The backward has come to its end."""
        self.gradients = {id(leaf): leaf.grad for leaf in self.leaves if accumulated and leaf.grad is not None}
        self._zero = frozenset(key for key, gradient in self.gradients.items() if _is_zero(gradient))

    @property
    def put(self) -> Iterable[torch.Tensor]:
        """The gradients, where it has put them somewhere."""
        return (self.gradients or {}).values()

    def reaches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Its gradients are there for these tensors to be updated with."""
        own = {id(leaf) for leaf in self.leaves}
        return self.gradients is None or any(id(t) in own and self._is_there(t) for t in tensors)

    @property
    def cleared(self) -> bool:
        """Its gradients were put somewhere, and are there no more."""
        return bool(self.gradients) and not any(map(self._is_there, self.leaves))

    def _is_there(self, leaf: torch.Tensor) -> bool:
        if not self.gradients:
            return True  # handed out: nobody sees what becomes of them
        gradient = self.gradients.get(id(leaf))
        return gradient is not None and leaf.grad is gradient and (id(leaf) in self._zero or not _is_zero(gradient))


class Undecided:
    """Those of which the loop has not shown yet whether it uses them."""

    def __init__(self) -> None:
        self._open: list[Spread] = []

    def add(self, spread: Spread) -> None:
        """A backward begins, or is found to have spread something."""
        self._open.append(spread)

    def next_backward(self) -> None:
        """The loop goes on: it has left out what it has cleared, and what it was handed and did not step with."""
        self._open = [spread for spread in self._open if spread.gradients and not spread.cleared]

    def next_step(self) -> None:
        """A step was taken that used none of it."""
        for spread in self._open:
            spread.passed_over, spread.origins = True, NONE

    def used_by(self, optimizer: Any) -> Spread | None:
        """The first of which a step of this optimizer makes use."""
        held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        return next((spread for spread in self._open if spread.reaches(held)), None)

    def left(self, asked: Births, *, stepped: bool) -> Spread | None:
        """The first that the loop did not leave out, now that it is over.

        Where nothing follows, a step that is left out and a test that takes no steps look alike. It is left out where
        the loop takes steps otherwise and has looked.

        Args:
            asked: What the code has looked at.
            stepped: An optimizer has taken steps.
        """
        for spread in self._open:
            looked = spread.passed_over or (stepped and bool(spread.origins & asked))
            if not (spread.curable or spread.cleared or looked):
                return spread
        return None


def _is_zero(gradient: torch.Tensor) -> bool:
    with unseen():
        return gradient.layout is torch.strided and not bool(gradient.count_nonzero())


def leaves_of(roots: Iterable[Any], inputs: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that a backward gives gradients: its inputs where it names them, else the leaves of its graph."""
    named = [t for t in inputs if isinstance(t, torch.Tensor)]
    if named:
        return named
    waiting = [root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None]
    found = {id(root): root for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is None}
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())
