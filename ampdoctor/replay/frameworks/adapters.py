"""What frameworks hand over in place of a `TrainingRun`: the seam, one adapter a framework, and their table."""

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
    """A framework whose objects a factory may return; a Protocol so that a new framework is one new file."""

    @property
    def name(self) -> str:
        """The framework's name, as in a sentence: "the Hugging Face Trainer"."""

    def claims(self, made: object) -> bool:
        """Is it what this framework makes? Nothing is imported for the question: what is not imported made nothing."""

    def run_of(self, made: Any) -> TrainingRun:
        """Returns the run whose step is the framework's own.

        Raises:
            FactoryError: It cannot be replayed (DeepSpeed's engine, FSDP, several processes); one sentence says what.
        """

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:
        """While inside, a script's call of the framework's entry (`Trainer.train`, `Trainer.fit`) trains nothing.

        Args:
            reached: Called with what `claims` claims in the entry's place; it raises.
        """


# Accelerate: what `Accelerator.prepare` gives, with the Accelerator, stands for the loop of its documentation.


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


# Lightning: a LightningModule with its Trainer, DataModule or loader, from `lightning` or `pytorch_lightning`.


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


# The Hugging Face Trainer and what is built on it: subclasses, TRL's trainers, PEFT's models in any of them.


_MODULE = "transformers.trainer"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entered:
    """A script's call of `Trainer.train`.

    Attributes:
        trainer: The Trainer.
        arguments: Of the call, by name: `resume_from_checkpoint` and the like.
    """

    trainer: Any
    arguments: dict[str, Any]


class _HuggingFaceTrainer:
    """As in `Adapter`."""

    name = "the Hugging Face Trainer"

    def claims(self, made: object) -> bool:
        """As in `Adapter`."""
        module = sys.modules.get(_MODULE)
        return isinstance(made, Entered) or (module is not None and isinstance(made, module.Trainer))

    def run_of(self, made: Any) -> TrainingRun:
        """As in `Adapter`."""
        entered = made if isinstance(made, Entered) else Entered(trainer=made, arguments={})
        return TrainingRun.from_trainer(entered.trainer, **entered.arguments)

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:
        """As in `Adapter`."""

        def stand_in(original: Original) -> Original:
            signature = inspect.signature(original)

            def train(*args: Any, **kwargs: Any) -> None:
                arguments = signature.bind(*args, **kwargs).arguments
                arguments.update(arguments.pop("kwargs", {}))  # older releases take some that are deprecated
                reached(Entered(trainer=arguments.pop("self"), arguments=arguments))

            return train

        return standing_in(_MODULE, "Trainer", "train", stand_in)


TRAINER: Final[Adapter] = _HuggingFaceTrainer()


# The frameworks that are known.


ADAPTERS: Final[tuple[Adapter, ...]] = (TRAINER, LIGHTNING, ACCELERATE)
"""Asked in this order who claims what a factory returned."""


def adapter_of(made: object) -> Adapter | None:
    """Returns the framework that made it; None if it is none that is known."""
    return next((adapter for adapter in ADAPTERS if adapter.claims(made)), None)
