"""Accelerate: what `Accelerator.prepare` gives, with the Accelerator, stands for the loop of its documentation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.adapter import Adapter
from ampdoctor.replay.training_run import TrainingRun, kind_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """A part that is looked for among those of a factory.

    Attributes:
        argument: Of `TrainingRun.from_accelerate`.
        known: Is it this one?
        several: May there be more than one, of which the first is meant (the loader of the validation is another)?
    """

    argument: str
    known: Callable[[Any], bool]
    several: bool = False


class _Accelerate:
    """As in `Adapter`."""

    name = "Accelerate"

    def claims(self, made: object) -> bool:
        """As in `Adapter`: a tuple, list or mapping with an Accelerator in it."""
        return any(map(_is_accelerator, _values(made)))

    def run_of(self, made: Any) -> TrainingRun:
        """As in `Adapter`."""
        return TrainingRun.from_accelerate(**_sorted_out(_values(made)))

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """As in `Adapter`: a loop with an Accelerator is the script's own, and no call enters it."""
        return nullcontext()


def _values(made: object) -> list[Any]:
    if isinstance(made, Mapping):
        return list(made.values())
    return list(made) if isinstance(made, tuple | list) else []


def _is_accelerator(value: object) -> bool:
    module = sys.modules.get("accelerate")
    return isinstance(getattr(module, "Accelerator", None), type) and isinstance(value, module.Accelerator)  # type: ignore[union-attr]


def _sorted_out(values: list[Any]) -> dict[str, Any]:
    """Returns the arguments of `TrainingRun.from_accelerate`, in whatever order the factory gave them.

    Raises:
        FactoryError: There are two of a kind of which a loop has one, or something else.
    """
    import torch
    from torch import nn

    parts = (
        _Part(argument="accelerator", known=_is_accelerator),
        _Part(argument="model", known=lambda value: isinstance(value, nn.Module)),
        _Part(argument="optimizer", known=lambda value: isinstance(value, torch.optim.Optimizer)),
        _Part(argument="scheduler", known=lambda value: hasattr(value, "get_last_lr")),
        _Part(argument="dataloader", known=lambda value: hasattr(value, "__iter__"), several=True),
    )
    found: dict[str, Any] = {}
    for value in values:
        part = next((part for part in parts if part.known(value)), None)
        if part is None:
            raise FactoryError(f"{kind_of(value)} among what the factory returned is no part of Accelerate's loop")
        if part.argument not in found:
            found[part.argument] = value
        elif not part.several:
            raise FactoryError(
                f"the factory returned two parts that are each a loop's {part.argument}: "
                f"hand such a loop over with TrainingRun(step=...)"
            )
    absent = [part.argument for part in parts if part.argument not in found and part.argument != "scheduler"]
    if absent:
        raise FactoryError(f"beside the Accelerator the factory returned no {' and no '.join(absent)}")
    return found


ACCELERATE: Final[Adapter] = _Accelerate()
