"""`AmpDoctorCallback` for `transformers.Trainer`, and for those that are made of it (TRL's)."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ampdoctor.integrations.callback_watch import CallbackWatch

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Report


class AmpDoctorCallback(TrainerCallback):
    """Watches each training of the Trainer whose `callbacks` it is in, as `ampdoctor.watch` does.

    A Trainer tells its callbacks of no exception. Given to it as one of `callbacks`, this one hears of them from
    `trainer.train`; added later, by `add_callback`, it hears of none, and a watch that an exception has left standing
    ends when the next training begins.

    Args:
        settings: Those of `ampdoctor.watch`, by keyword: `folder`, `every`, `on_sick`, `look`, `guard`, `bundle`,
            `bundle_max`, `record_batches`, `tell`.
    """

    def __init__(self, **settings: Any) -> None:
        self._watch = CallbackWatch(settings)

    @property
    def report(self) -> Report | None:
        """The diagnosis of the last training's first sick step; None as long as there is nothing to say."""
        return self._watch.report

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the framework's seam
        """The Trainer is made, and a frame above this one makes it."""
        trainer = _trainer_above(self)
        if trainer is not None:
            self._hear_of_errors(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002 - the framework's seam
        """Begin."""
        self._watch.begin(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the framework's seam
        """End."""
        self._watch.end(None)

    def _hear_of_errors(self, trainer: Any) -> None:
        original = trainer.train

        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self._watch.end(error)
                raise

        trainer.train = train


def _trainer_above(callback: TrainerCallback) -> Any:
    frame = sys._getframe(1)  # noqa: SLF001 - callbacks are not given their Trainer
    while frame is not None:
        found = frame.f_locals.get("self")
        if callback in getattr(getattr(found, "callback_handler", None), "callbacks", ()) and hasattr(found, "train"):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None
