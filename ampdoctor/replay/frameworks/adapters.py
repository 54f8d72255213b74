"""`Adapter`, the interface to a framework's objects, with one implementation per framework and their table."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.lightning import PACKAGES
from ampdoctor.replay.frameworks.resuming import Original, standing_in
from ampdoctor.replay.training_run import TrainingRun, kind_of


class Adapter(Protocol):
    """A framework whose objects a factory may return; a Protocol, so that a new framework needs one new class."""

    @property
    def name(self) -> str:
        """The framework's name, as in a sentence: "the Hugging Face Trainer"."""

    def claims(self, made: object) -> bool:
        """Is it an object of this framework? Nothing is imported: without an import there is no such object."""

    def run_of(self, made: Any) -> TrainingRun:
        """Returns the run with the framework's own step; raises FactoryError if it cannot be replayed."""

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:
        """Inside, a script's call of the framework's entry (`Trainer.train`, `Trainer.fit`) trains nothing."""


# -- Accelerate: the results of `Accelerator.prepare`, with the Accelerator --


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """A part that is looked up in what a factory returned."""

    argument: str  # of `TrainingRun.from_accelerate`
    known: Callable[[Any], bool]
    several: bool = False  # several may be there, and the first one counts (a second loader is for validation)


class _Accelerate:
    """See `Adapter`."""

    name = "Accelerate"

    def claims(self, made: object) -> bool:
        """See `Adapter`: a tuple, list or mapping with an Accelerator in it."""
        return any(map(_is_accelerator, _values(made)))

    def run_of(self, made: Any) -> TrainingRun:
        """See `Adapter`."""
        return TrainingRun.from_accelerate(**_sorted_out(_values(made)))

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """See `Adapter`: a loop with an Accelerator is the script's own, and has no entry."""
        return nullcontext()


def _values(made: object) -> list[Any]:
    if isinstance(made, Mapping):
        return list(made.values())
    return list(made) if isinstance(made, tuple | list) else []


def _is_accelerator(value: object) -> bool:
    module = sys.modules.get("accelerate")
    return isinstance(getattr(module, "Accelerator", None), type) and isinstance(value, module.Accelerator)  # type: ignore[union-attr]


def _sorted_out(values: list[Any]) -> dict[str, Any]:
    """Returns the arguments of `TrainingRun.from_accelerate` from parts in any order, or raises FactoryError."""
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


# -- Lightning: a LightningModule with its Trainer, DataModule or loader --


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A call of `Trainer.fit`."""

    trainer: Any  # None: one with Lightning's defaults
    module: Any
    arguments: dict[str, Any] = field(default_factory=dict)  # others by name: `train_dataloaders`, `ckpt_path`


class _Lightning:
    """See `Adapter`."""

    name = "Lightning"

    def claims(self, made: object) -> bool:
        """See `Adapter`: a tuple or a list with a LightningModule in it."""
        parts = made if isinstance(made, tuple | list) and 1 < len(made) <= len(Fitted.__slots__) else ()
        return isinstance(made, Fitted) or any(_is(part, "LightningModule") for part in parts)

    def run_of(self, made: Any) -> TrainingRun:
        """See `Adapter`."""
        fitted = made if isinstance(made, Fitted) else _fitted(made)
        return TrainingRun.from_lightning(fitted.module, fitted.trainer, **fitted.arguments)

    @contextmanager
    def at_entry(self, reached: Callable[[object], None]) -> Iterator[None]:
        """See `Adapter`."""

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
    """Is it an object of this class of Lightning's? Nothing is imported."""
    classes = (getattr(sys.modules.get(package), cls, None) for package in PACKAGES)
    return any(isinstance(found, type) and isinstance(value, found) for found in classes)


def _fitted(made: tuple[Any, ...] | list[Any]) -> Fitted:
    """Returns the call of `fit` for a factory's parts, in any order; raises FactoryError for two of a kind."""
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


# -- the Hugging Face Trainer, with subclasses (TRL's) and any model (PEFT's) --

_MODULE = "transformers.trainer"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entered:
    """A script's call of `Trainer.train`, with its arguments by name."""

    trainer: Any
    arguments: dict[str, Any]


class _HuggingFaceTrainer:
    """See `Adapter`."""

    name = "the Hugging Face Trainer"

    def claims(self, made: object) -> bool:
        """See `Adapter`."""
        module = sys.modules.get(_MODULE)
        return isinstance(made, Entered) or (module is not None and isinstance(made, module.Trainer))

    def run_of(self, made: Any) -> TrainingRun:
        """See `Adapter`."""
        entered = made if isinstance(made, Entered) else Entered(trainer=made, arguments={})
        return TrainingRun.from_trainer(entered.trainer, **entered.arguments)

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:
        """See `Adapter`."""

        def stand_in(original: Original) -> Original:
            signature = inspect.signature(original)

            def train(*args: Any, **kwargs: Any) -> None:
                arguments = signature.bind(*args, **kwargs).arguments
                arguments.update(arguments.pop("kwargs", {}))  # older releases have deprecated ones there
                reached(Entered(trainer=arguments.pop("self"), arguments=arguments))

            return train

        return standing_in(_MODULE, "Trainer", "train", stand_in)


TRAINER: Final[Adapter] = _HuggingFaceTrainer()


ADAPTERS: Final[tuple[Adapter, ...]] = (TRAINER, LIGHTNING, ACCELERATE)
"""The order in which they are asked whether they claim a factory's result."""


def adapter_of(made: object) -> Adapter | None:
    """Returns the adapter of the framework that made it; None if there is none."""
    return next((adapter for adapter in ADAPTERS if adapter.claims(made)), None)
