"""Which optimizers, scalers and schedulers a script makes, in their order: it identifies them in the next run."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch

from ampdoctor.replay.scripts.source.finding import lines_of


class Made:
    """The optimizers, scalers and schedulers that were made while `watching`, in their order."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Any]] = []
        self._lines: list[tuple[tuple[str, int], ...]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What is made inside is listed."""
        kinds = torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler
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
                self._lines.append(lines_of(walk_stack(sys._getframe(1))))  # noqa: SLF001 the user's line is up there
            original(made, *args, **kwargs)

        return init

    def place_of(self, made: Any) -> int | None:
        """Returns the place of an object in the order; None if it was made elsewhere."""
        return next((place for place, known in enumerate(self._all) if known() is made), None)

    def by_lines(self, file: str, lines: range) -> tuple[Any, ...]:
        """Returns what was made by one of these lines of a file, or by what they call."""
        there = [(known(), made_by) for known, made_by in zip(self._all, self._lines, strict=True)]
        return tuple(
            made
            for made, made_by in there
            if made is not None and any(name == file and line in lines for name, line in made_by)
        )

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
