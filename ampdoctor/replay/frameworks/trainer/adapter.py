"""The Hugging Face Trainer and what is built on it: subclasses, TRL's trainers, PEFT's models in any of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from ampdoctor.replay.frameworks.adapter import Adapter
from ampdoctor.replay.frameworks.entry import Original, standing_in
from ampdoctor.replay.training_run import TrainingRun

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
