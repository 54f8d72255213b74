"""Whose gradients add up, since when, and whether they are still what a backward has left."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.torch_internals import unseen, version_of
from ampdoctor.live.recording.models import OutermostModels


def parameters_of(owner: Any) -> list[torch.Tensor]:
    """Returns those of a model, or of an optimizer."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]


class Gradients:
    """Who holds gradients, and what was done to them. Moments are counts: of what was recorded before.

    Args:
        models: The loop's.
    """

    def __init__(self, models: OutermostModels) -> None:
        self._models = models
        self._stepped: dict[int, tuple[weakref.ref[Any], int]] = {}  # by optimizer: when its last update was
        self._cleared: dict[int, tuple[weakref.ref[Any], int]] = {}  # by owner: when they were cleared
        self._filled: set[int] = set()  # owners that held some after the last backward
        self._as_left: dict[int, tuple[int, int]] = {}  # by parameter: its gradient, and how often that was written to
        self._edited: set[int] = set()  # parameters whose gradient the loop itself has changed since

    # -- what happens to them ----------------------------------------------------------------------------------------

    def filled(self) -> None:
        """A backward has added to them."""
        self._filled = {id(owner) for owner in self.owners() if _hold_gradients(owner)}
        self.left()

    def left(self) -> None:
        """They are as a backward, or a scaler, has left them."""
        self._as_left = {
            id(p): (id(gradient), version_of(gradient))
            for owner in self.owners()
            for p in parameters_of(owner)
            if (gradient := p.grad) is not None
        }

    def unreadable(self) -> None:
        """Nobody may read them now."""
        self._filled.clear()
        self._as_left.clear()

    def clipped(self, gradients: Collection[int]) -> None:
        """These are about to be written to by what is recorded.

        Args:
            gradients: The `id` of each.
        """
        self._as_left = {
            key: (gradient, version + (gradient in gradients)) for key, (gradient, version) in self._as_left.items()
        }

    def updated(self, optimizer: torch.optim.Optimizer, at: int) -> None:
        """An optimizer has used its own."""
        self._stepped[id(optimizer)] = weakref.ref(optimizer), at
        self._filled.clear()
        self._forget(optimizer)

    def cleared(self, owner: Any, at: int) -> None:
        """A model's, or an optimizer's, were cleared."""
        self._cleared[id(owner)] = weakref.ref(owner), at
        self._filled.discard(id(owner))
        self._forget(owner)

    def _forget(self, owner: Any) -> None:
        for p in parameters_of(owner):
            self._as_left.pop(id(p), None)
            self._edited.discard(id(p))

    def find_edited(self) -> None:
        """Notes whose gradients are no more as they were left."""
        for owner in self.owners() if self._as_left else ():
            for p in parameters_of(owner):
                left, gradient = self._as_left.get(id(p)), p.grad
                if left is not None and gradient is not None and left != (id(gradient), version_of(gradient)):
                    self._edited.add(id(p))

    # -- what is known of them ---------------------------------------------------------------------------------------

    def is_edited(self, parameter: int) -> bool:
        """Whether the loop itself has changed a parameter's gradient.

        Args:
            parameter: Its `id`.
        """
        return parameter in self._edited

    def emptied(self) -> Iterator[Any]:
        """Yields who held some after the last backward and holds none now."""
        for owner in self.owners():
            if id(owner) in self._filled and not _hold_gradients(owner):
                yield owner

    def owners(self) -> list[Any]:
        """Who holds gradients: the optimizers, or before the first update the models."""
        optimizers = [there for reference, _ in self._stepped.values() if (there := reference()) is not None]
        return optimizers or [root for _, root in self._models.roots]

    def oldest_update(self) -> int:
        """Returns the earliest of the optimizers' last updates: what was recorded before it adds up no more."""
        return min((count for there, count in self._stepped.values() if there() is not None), default=0)

    def were_cleared_after(self, moment: int) -> bool:
        """Whether anybody's were cleared after this moment."""
        return any(count > moment for _, count in self._cleared.values())

    def began(self, held: set[int], optimizer: Any) -> int:
        """Returns when these parameters' gradients began to add up: they were used or cleared then.

        Args:
            held: The `id` of each.
            optimizer: Who uses them; None for any.
        """
        if optimizer is None:
            begun = max((count for _, count in self._stepped.values()), default=0)
        else:
            begun = self._stepped[id(optimizer)][1] if id(optimizer) in self._stepped else 0
        for owner, count in self._cleared.values():
            there = owner()
            if there is None or count <= begun:
                continue
            if held <= {id(p) for p in parameters_of(there)}:
                begun = count
        return begun

    def have_moved(self, held: set[int], since: int) -> bool:
        """Whether an optimizer has updated one of these parameters after a moment.

        Args:
            held: The `id` of each.
            since: The moment.
        """
        return any(
            count > since
            and (optimizer := there()) is not None
            and any(id(p) in held for p in parameters_of(optimizer))
            for there, count in self._stepped.values()
        )


def _hold_gradients(owner: Any) -> bool:
    """Whether an owner's gradients are there, and are not all zeros, which a device would have to be waited for."""
    with unseen():
        return any(
            (gradient := p.grad) is not None
            and (gradient.device.type != "cpu" or type(gradient) is not torch.Tensor or _any(gradient))
            for p in reversed(parameters_of(owner))
        )


def _any(gradient: torch.Tensor) -> bool:
    return gradient.layout != torch.strided or bool(gradient.any())
