"""`AmpDoctorCallback` for Lightning, under either of its package names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ampdoctor.integrations.callback_watch import WatchCallback

_NAMES = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")


def _bases() -> tuple[Any, ...]:
    """Returns Lightning's `Callback` of each package that is imported already, else of one that is installed."""
    used = [name for name in _NAMES if name in sys.modules]
    there = used or [name for name in _NAMES if find_spec(name.partition(".")[0]) is not None][:1] or list(_NAMES[:1])
    return tuple(import_module(name).Callback for name in there)


class AmpDoctorCallback(WatchCallback, *_bases()):  # type: ignore[misc]  # the base class is known only at run time
    """Watches each fit of a Trainer as `ampdoctor.watch` does; pass it in `callbacks`.

    Args:
        settings: Those of `ampdoctor.watch`, by keyword: `folder`, `every`, `on_sick`, `look`, `guard`, `bundle`,
            `bundle_max`, `record_batches`, `checkpoints` (True: where `ModelCheckpoint` saves), `probation`,
            `good_max`, `tell`.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the watch."""
        self._begin(pl_module, getattr(trainer.checkpoint_callback, "dirpath", None))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - the framework's seam
        """Ends the watch."""
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002 - the framework's seam
        """Ends the watch with the exception that ended the fit."""
        self._end(exception)
