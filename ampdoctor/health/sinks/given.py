"""Sinks that a user has made: an object of ours, or a writer of scalars as TensorBoard's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Finding
from ampdoctor.health.sinks.metrics import PREFIX
from ampdoctor.health.sinks.sink import Sink, text_of_alert, title_of


class ScalarWriter:
    """Writes to any object with `add_scalar(tag, value, step)`; `add_text` and `flush` are used where it has them.

    It is the user's, who closes it.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:  # noqa: ARG002 - not all take it
        """As in `Sink`."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{PREFIX}/{name}", value, step)

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:  # noqa: ARG002 - the same
        """As in `Sink`."""
        if hasattr(self._writer, "add_text"):
            self._writer.add_text(f"{PREFIX}/alerts/{title_of(finding)}", text_of_alert(finding, step), step)

    def flush(self) -> None:
        """As in `Sink`."""
        if hasattr(self._writer, "flush"):
            self._writer.flush()

    def close(self) -> None:
        """As in `Sink`, but for the writer's own end."""
        self.flush()


def sink_of(given: Any) -> Sink:
    """Returns a user's object as a sink.

    Raises:
        UsageError: It is none.
    """
    if isinstance(given, Sink):
        return given
    if callable(getattr(given, "add_scalar", None)):
        return ScalarWriter(given)
    raise UsageError(
        f"export: a {type(given).__name__} is neither text like tensorboard=DIR, nor has it log, alert, flush and "
        "close, nor add_scalar"
    )
