"""`WatchCallback`: a watch that a framework's events begin and end."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ampdoctor.workflows.watch import watch

if TYPE_CHECKING:
    from torch import nn

    from ampdoctor.evidence.report import Report
    from ampdoctor.workflows.watch import Watch


class WatchCallback:
    """Watches each training between two events of a framework, with the `settings` of `ampdoctor.watch`.

    `checkpoints=True` stands for the folder that the framework saves to.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings
        self._stack = ExitStack()
        self._watch: Watch | None = None

    @property
    def report(self) -> Report | None:
        """The diagnosis of the last training's first bad step; None if there was none."""
        return None if self._watch is None else self._watch.report

    def _begin(self, model: nn.Module | None, saves_to: str | None) -> None:
        """Begins a watch of the model's training, and ends an earlier one that is still open."""
        self._end(None)
        settings = dict(self._settings)
        if settings.get("checkpoints") is True:
            settings["checkpoints"] = saves_to
        self._watch = self._stack.enter_context(watch(model, **settings))

    def _end(self, error: BaseException | None) -> None:
        """Ends the watch with the exception that ended the training, if any, which may become a SickTrainingError."""
        stack = self._stack.pop_all()
        try:
            stack.__exit__(
                None if error is None else type(error), error, None if error is None else error.__traceback__
            )
        except BaseException as other:
            if other is not error:
                raise
