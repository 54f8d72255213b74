"""`AmpDoctorCallback` for `transformers.Trainer` and the Trainers based on it (TRL's)."""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers import TrainerCallback

from ampdoctor.integrations.callback_watch import WatchCallback


class AmpDoctorCallback(WatchCallback, TrainerCallback):
    """Watches each training of a Trainer as `ampdoctor.watch` does; pass it in `callbacks`.

    A Trainer does not report exceptions to its callbacks. If this one is passed in `callbacks`, it wraps
    `trainer.train` to notice them. If it is added later with `add_callback`, it cannot, and a watch that an exception
    left open ends when the next training begins.

    Args:
        settings: Those of `ampdoctor.watch`, by keyword: `folder`, `every`, `on_sick`, `look`, `guard`, `bundle`,
            `bundle_max`, `record_batches`, `checkpoints` (True: `output_dir`), `probation`, `good_max`, `tell`.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the framework's seam
        """Wraps the Trainer's `train`; the Trainer is found in a frame above, where it is constructed."""
        trainer = _trainer_above(self)
        if trainer is not None:
            self._add_error_callback(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002 - the framework's seam
        """Begins the watch."""
        self._begin(model, args.output_dir)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the framework's seam
        """Ends the watch."""
        self._end(None)

    def _add_error_callback(self, trainer: Any) -> None:
        original = trainer.train

        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                self._end(error)
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
