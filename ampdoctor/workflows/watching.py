"""A training that is not ours, watched while it runs once: from before its first line until after its last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ampdoctor.evidence.report import Report
from ampdoctor.workflows.opening.watch_request import WatchRequest


@dataclass(slots=True, kw_only=True)
class Watching:
    """A watch, and what it has come to.

    Attributes:
        report: What was found; None as long as there is nothing to say.
    """

    report: Report | None = None


@contextmanager
def watching(request: WatchRequest) -> Iterator[Watching]:  # noqa: ARG001 - what is asked is not yet looked at
    """Watches whatever trains in this process until the block ends; everything is unhooked then."""
    yield Watching()
