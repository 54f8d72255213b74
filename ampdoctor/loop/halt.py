"""The end of a step that a probe has seen enough of."""

from __future__ import annotations


class StepHalted(BaseException):
    """A probe ends the running step: what comes after in it need not run.

    No `Exception`, so that a user's `except Exception` in a forward or around a step does not swallow it. Whoever
    attached the probe catches it, and restores the snapshot that the step began with.
    """
