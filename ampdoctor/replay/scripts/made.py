"""Which optimizers, scalers and schedulers a script makes, in order: by that its next run knows them again."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ampdoctor.replay.scripts.anew import Anew, Origin, made_in_round, origin_of
from ampdoctor.replay.scripts.source.finding import LoopPlace


class Made:
    """The optimizers, scalers and schedulers that were made while `watching`, in their order."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Any]] = []
        self._origins: list[Origin] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What is made inside is listed."""
        kinds = torch.optim.Optimizer, torch.amp.GradScaler, LRScheduler
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
                self._origins.append(origin_of(sys._getframe(1)))  # noqa: SLF001 the one way up that makes no traceback
            original(made, *args, **kwargs)

        return init

    def place_of(self, made: Any) -> int | None:
        """Returns the place of an object in the order; None if it was made elsewhere."""
        return next((place for place, known in enumerate(self._all) if known() is made), None)

    def at(self, place: int) -> Any:
        """Returns what was made at this place; None if it is gone, or was never made."""
        return self._all[place]() if place < len(self._all) else None

    def anew(self, around: LoopPlace | None, frame: FrameType) -> Anew:
        """Returns what makes anew what the running round of the loop around the script's has made.

        Args:
            around: That loop; None if there is none.
            frame: The frame of the script's loop.
        """
        made = zip(self._all, self._origins, strict=True)
        return Anew(
            one
            for known, origin in made
            if (one := known()) is not None and around is not None and made_in_round(origin, around, frame)
        )

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
