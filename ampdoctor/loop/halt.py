"""The exception with which a probe ends a step."""

from __future__ import annotations


class StepHalted(BaseException):
    """A probe has seen enough and ends the running step; the rest of the step need not run.

    It is not an `Exception`, so that a user's `except Exception` in a forward or around a step does not swallow it.
    Whoever attached the probe catches it, and restores the snapshot that the step began with.
    """
