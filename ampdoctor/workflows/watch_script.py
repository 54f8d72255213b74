"""Watches a training script while it runs once, from before its first line until after its last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ampdoctor.hooks.interfaces import when_imported
from ampdoctor.workflows.output_files import give_back

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Report
    from ampdoctor.workflows.requests import WatchRequest
    from ampdoctor.workflows.watcher import TrainingWatcher


def _nobody(_: object) -> None:
    pass


class ScriptWatch:
    """A watch and its result; it begins when the script itself has imported torch (`doctor` is None before)."""

    def __init__(self) -> None:
        self.doctor: TrainingWatcher | None = None

    @property
    def report(self) -> Report | None:
        """The diagnosis of the first sick step; None as long as there is none."""
        return None if self.doctor is None else self.doctor.report

    @property
    def has_begun(self) -> bool:
        """Whether the script has imported torch, and there is a log."""
        return self.doctor is not None

    def ended(self, error: BaseException | None) -> None:
        """End the watch: the script has finished, or raised this error."""
        if self.doctor is not None:
            self.doctor.ended(error)


@contextmanager
def watching(
    request: WatchRequest,
    *,
    tell: Callable[[Report], None] = _nobody,
    say: Callable[[str], None] = _nobody,
) -> Iterator[ScriptWatch]:
    """Watch whatever trains in this process until the block ends; `tell` gets the diagnosis, `say` gets sentences."""
    watch = ScriptWatch()
    with ExitStack() as stack:

        def begin() -> None:
            from ampdoctor.hooks.process_state import unwarned

            with unwarned():
                from ampdoctor.workflows.watcher import TrainingWatcher

                watch.doctor = TrainingWatcher(request, tell, say)
                stack.enter_context(watch.doctor.attending())

        def failed(error: Exception) -> None:
            watch.doctor = None
            say(f"the training is not watched: {type(error).__name__}: {error}".splitlines()[0])

        with when_imported("torch", begin, failed):
            yield watch
    give_back(request.health)
