"""The frameworks whose objects a factory may return or a script may enter, each with an adapter, and their table.

An adapter `claims` what its framework makes, importing nothing; `run_of` returns the run with the framework's own step,
or raises FactoryError; inside `at_entry` a call of the framework's entry only calls `reached`, which raises.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.lightning import PACKAGES
from ampdoctor.replay.frameworks.resuming import Original, standing_in
from ampdoctor.replay.training_run import TrainingRun, kind_of

# -- Accelerate: the results of `Accelerator.prepare`, with the Accelerator --


class _Accelerate:
    name = "Accelerate"

    def claims(self, made: object) -> bool:
        return any(map(_is_accelerator, _values(made)))

    def run_of(self, made: Any) -> TrainingRun:
        return TrainingRun.from_accelerate(**_sorted_out(_values(made)))

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """A loop with an Accelerator is the script's own."""
        return nullcontext()


def _values(made: object) -> list[Any]:
    if isinstance(made, Mapping):
        return list(made.values())
    return list(made) if isinstance(made, tuple | list) else []


def _is_accelerator(value: object) -> bool:
    module = sys.modules.get("accelerate")
    return isinstance(getattr(module, "Accelerator", None), type) and isinstance(value, module.Accelerator)  # type: ignore[union-attr]


def _sorted_out(values: list[Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    parts: dict[str, Callable[[Any], bool]] = {
        "accelerator": _is_accelerator,
        "model": lambda value: isinstance(value, nn.Module),
        "optimizer": lambda value: isinstance(value, torch.optim.Optimizer),
        "scheduler": lambda value: hasattr(value, "get_last_lr"),
        "dataloader": lambda value: hasattr(value, "__iter__"),
    }
    found: dict[str, Any] = {}
    for value in values:
        part = next((part for part, known in parts.items() if known(value)), None)
        if part is None:
            raise FactoryError(f"{kind_of(value)} among what the factory returned is no part of Accelerate's loop")
        if part in found and part != "dataloader":  # a second one is for validation
            raise FactoryError(
                f"the factory returned two parts that are each a loop's {part}: "
                f"hand such a loop over with TrainingRun(step=...)"
            )
        found.setdefault(part, value)
    absent = [part for part in parts if part not in found and part != "scheduler"]
    if absent:
        raise FactoryError(f"beside the Accelerator the factory returned no {' and no '.join(absent)}")
    return found


ACCELERATE: Final = _Accelerate()


# -- Lightning: a LightningModule with its Trainer, DataModule or loader --


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A call of `Trainer.fit`."""

    trainer: Any  # None: one with Lightning's defaults
    module: Any
    arguments: dict[str, Any] = field(default_factory=dict)  # others by name: `train_dataloaders`, `ckpt_path`


class _Lightning:
    name = "Lightning"

    def claims(self, made: object) -> bool:
        parts = made if isinstance(made, tuple | list) and 1 < len(made) <= len(Fitted.__slots__) else ()
        return isinstance(made, Fitted) or any(_is(part, "LightningModule") for part in parts)

    def run_of(self, made: Any) -> TrainingRun:
        fitted = made if isinstance(made, Fitted) else _fitted(made)
        return TrainingRun.from_lightning(fitted.module, fitted.trainer, **fitted.arguments)

    @contextmanager
    def at_entry(self, reached: Callable[[object], None]) -> Iterator[None]:
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
    classes = (getattr(sys.modules.get(package), cls, None) for package in PACKAGES)
    return any(isinstance(found, type) and isinstance(value, found) for found in classes)


def _fitted(made: tuple[Any, ...] | list[Any]) -> Fitted:
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


LIGHTNING: Final = _Lightning()


# -- the Hugging Face Trainer, with subclasses (TRL's) and any model (PEFT's) --

_MODULE = "transformers.trainer"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entered:
    """A script's call of `Trainer.train`, with its arguments by name."""

    trainer: Any
    arguments: dict[str, Any]


class _HuggingFaceTrainer:
    name = "the Hugging Face Trainer"

    def claims(self, made: object) -> bool:
        module = sys.modules.get(_MODULE)
        return isinstance(made, Entered) or (module is not None and isinstance(made, module.Trainer))

    def run_of(self, made: Any) -> TrainingRun:
        entered = made if isinstance(made, Entered) else Entered(trainer=made, arguments={})
        return TrainingRun.from_trainer(entered.trainer, **entered.arguments)

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:
        def stand_in(original: Original) -> Original:
            signature = inspect.signature(original)

            def train(*args: Any, **kwargs: Any) -> None:
                arguments = signature.bind(*args, **kwargs).arguments
                arguments.update(arguments.pop("kwargs", {}))  # older releases have deprecated ones there
                reached(Entered(trainer=arguments.pop("self"), arguments=arguments))

            return train

        return standing_in(_MODULE, "Trainer", "train", stand_in)


TRAINER: Final = _HuggingFaceTrainer()

Adapter = _HuggingFaceTrainer | _Lightning | _Accelerate
ADAPTERS: Final[tuple[Adapter, ...]] = (TRAINER, LIGHTNING, ACCELERATE)
"""The order in which they are asked whether they claim a factory's result."""


def adapter_of(made: object) -> Adapter | None:
    """Returns the adapter of the framework that made it; None if there is none."""
    return next((adapter for adapter in ADAPTERS if adapter.claims(made)), None)
