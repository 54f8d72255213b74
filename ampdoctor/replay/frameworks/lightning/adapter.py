"""Lightning: a LightningModule with its Trainer, DataModule or loader, from `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.adapter import Adapter
from ampdoctor.replay.frameworks.entry import Original, standing_in
from ampdoctor.replay.frameworks.lightning import PACKAGES
from ampdoctor.replay.training_run import TrainingRun, kind_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A call of `Trainer.fit`.

    Attributes:
        trainer: The Trainer; None: one with Lightning's defaults is made.
        module: The LightningModule.
        arguments: The call's others, by name: `train_dataloaders`, `datamodule`, `ckpt_path`.
    """

    trainer: Any
    module: Any
    arguments: dict[str, Any] = field(default_factory=dict)


class _Lightning:
    """As in `Adapter`."""

    name = "Lightning"

    def claims(self, made: object) -> bool:
        """As in `Adapter`: a tuple or a list with a LightningModule in it."""
        parts = made if isinstance(made, tuple | list) and 1 < len(made) <= len(Fitted.__slots__) else ()
        return isinstance(made, Fitted) or any(_is(part, "LightningModule") for part in parts)

    def run_of(self, made: Any) -> TrainingRun:
        """As in `Adapter`."""
        fitted = made if isinstance(made, Fitted) else _fitted(made)
        return TrainingRun.from_lightning(fitted.module, fitted.trainer, **fitted.arguments)

    @contextmanager
    def at_entry(self, reached: Callable[[object], None]) -> Iterator[None]:
        """As in `Adapter`."""

        def stand_in(original: Original) -> Original:
            signature = inspect.signature(original)

            def fit(*args: Any, **kwargs: Any) -> None:
                arguments = dict(signature.bind(*args, **kwargs).arguments)
                reached(Fitted(trainer=arguments.pop("self"), module=arguments.pop("model"), arguments=arguments))

            return fit

        with ExitStack() as stack:
            for package in PACKAGES:
                stack.enter_context(standing_in(f"{package}.trainer.trainer", "Trainer", "fit", stand_in))
            yield


def _is(value: object, cls: str) -> bool:
    """Is it an object of a class of Lightning's? None is imported for the question."""
    classes = (getattr(sys.modules.get(package), cls, None) for package in PACKAGES)
    return any(isinstance(found, type) and isinstance(value, found) for found in classes)


def _fitted(made: tuple[Any, ...] | list[Any]) -> Fitted:
    """Returns the call of `fit` that a factory's parts stand for, in any order.

    Raises:
        FactoryError: There are two of a kind.
    """
    kinds: dict[str, Any] = {}
    for part in made:
        kind = next((kind for kind in ("LightningModule", "Trainer") if _is(part, kind)), "data")
        if kind in kinds:
            raise FactoryError(
                f"the factory returned two of a kind, {kind_of(kinds[kind])} and {kind_of(part)}: "
                f"one LightningModule, one Trainer, and a DataModule or the training loader is what a replay takes"
            )
        kinds[kind] = part
    data = {"train_dataloaders": kinds["data"]} if kinds.get("data") is not None else {}
    return Fitted(trainer=kinds.get("Trainer"), module=kinds["LightningModule"], arguments=data)


LIGHTNING: Final[Adapter] = _Lightning()
