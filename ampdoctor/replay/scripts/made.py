"""Which optimizers and scalers a script makes, in its order: by that they are known again in its next run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Made:
    """The optimizers and scalers that were made while `watching`, in their order."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What is made inside is listed."""
        kinds = torch.optim.Optimizer, torch.amp.GradScaler
        originals = [kind.__init__ for kind in kinds]
        for kind, original in zip(kinds, originals, strict=True):
            kind.__init__ = self._noting(original)  # type: ignore[misc]
        try:
            yield
        finally:
            for kind, original in zip(kinds, originals, strict=True):
                kind.__init__ = original  # type: ignore[misc]

    def _noting(self, original: Any) -> Any:
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            if not any(known() is made for known in self._all):
                self._all.append(weakref.ref(made))
            original(made, *args, **kwargs)

        return init

    def place_of(self, made: Any) -> int | None:
        """Returns the place of an object in the order; None if it was made elsewhere."""
        return next((place for place, known in enumerate(self._all) if known() is made), None)

    def at(self, place: int) -> Any:
        """Returns what was made at this place; None if it is gone, or was never made."""
        return self._all[place]() if place < len(self._all) else None

    def training(self, module: torch.nn.Module) -> tuple[int, ...]:
        """Returns the places of the optimizers that hold a parameter of a module."""
        own = {id(parameter) for parameter in module.parameters()}
        return tuple(
            place
            for place, known in enumerate(self._all)
            if isinstance(made := known(), torch.optim.Optimizer)
            and any(id(one) in own for group in made.param_groups for one in group["params"])
        )

    def scalers(self) -> tuple[int, ...]:
        """Returns the places of the loss scalers that scale."""
        return tuple(
            place
            for place, known in enumerate(self._all)
            if isinstance(made := known(), torch.amp.GradScaler) and made.is_enabled()
        )
