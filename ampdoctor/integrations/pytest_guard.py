"""What the fixture `amp_guard` is: watches steps of a test, or replays a run, and fails the test with the diagnosis."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Report
from ampdoctor.live.op_watch import StepWatch
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.reports.human import plain_text
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

if TYPE_CHECKING:
    import torch
    from torch import nn


class NonFinite(pytest.fail.Exception):  # type: ignore[name-defined,misc]  # pytest makes it without annotations
    """A step went non-finite; the message is the diagnosis.

    As pytest's own failures it is no `Exception`, so that a training loop's `except Exception` does not hide it.

    Attributes:
        codes: Of what was found, each once.
        told: It has failed its test, and is not to be told again.
    """

    codes: tuple[str, ...] = ()
    told = False

    __module__ = "builtins"  # a failure's first line then begins with the bare name, as pytest's own do


_SET_ASIDE = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
"""What says that a test does not count. Its steps counted before it said so; an `xfail` mark, put there beforehand, is
pytest's to judge."""
_RUNNING: list[StepWatch] = []
"""The watch of the test that is running, where there is one: a second one would watch the first at work."""


class AmpGuard:
    """Fails the running test with a diagnosis."""

    @contextmanager
    def __call__(
        self,
        model: nn.Module | None = None,
        *,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        scaler: Any = None,
        max_skipped: int | None = None,
    ) -> Iterator[StepWatch]:
        """Watch the user's own steps inside this context; one inside another only tells that one of its parts.

        Args:
            model: The model; without it models are met when they are called.
            optimizer: The optimizer, or several by name; without it they are met at their first step.
            scaler: A loss scaler, where it is not torch's own.
            max_skipped: Steps that a scaler may skip in all; None: as many as it takes to settle.

        Raises:
            NonFinite: A step is sick, at that step.
        """
        if _RUNNING:
            _RUNNING[-1].meet(model, _listed(optimizer))
            yield _RUNNING[-1]
            return
        failed: list[NonFinite] = []

        def stop(report: Report) -> None:
            failed.append(_failure_of_step(report))
            raise failed[-1] from None  # what the test's own check said is in the diagnosis

        watch = StepWatch(stop, max_skipped=max_skipped)
        try:
            with watch.watching(model, _listed(optimizer), scaler):
                _RUNNING.append(watch)
                try:
                    yield watch
                finally:
                    _RUNNING.remove(watch)
        except _SET_ASIDE:
            if not failed:
                raise
        if failed and not failed[-1].told:  # the loop has swallowed it; a fixture's block only sees its test end
            raise failed[-1]

    def run(self, run: str | Callable[..., TrainingRun] | TrainingRun, *, steps: int = 8, **options: Any) -> Report:
        """Replay a run as `ampdoctor bisect-nan` does, with its cause and its cure proven by replay.

        Args:
            run: A factory, its name (`package.module:function`, `path/to/file.py:function`), or a run. A factory is
                better: a run is copied for each fresh start, and what its functions close over is not.
            steps: Optimizer steps to replay.
            options: Further fields of `ampdoctor.ReplayRequest` (`checkpoint`, `precision`, `arguments`, ...).

        Returns:
            The report, where it has no errors.

        Raises:
            NonFinite: A finding is an error; the message is the first finding and the whole report.
            AmpdoctorError: The run cannot be replayed.
        """
        factory: Any = run
        if isinstance(run, TrainingRun):
            first = copy.deepcopy(run)

            def training_run() -> TrainingRun:
                return copy.deepcopy(first)

            factory = training_run
        unknown = sorted(set(options) - set(ReplayRequest.__dataclass_fields__))
        if unknown:
            raise UsageError(f"amp_guard.run has no option {unknown[0]!r}; it takes the fields of ReplayRequest")
        report = bisect_nan(ReplayRequest(factory=factory, steps=steps, **options))
        if report.worst() == "error":
            worst = report.findings[0]
            raise _failure(report, f"{worst.code} {worst.name}: {worst.message}\n\n{plain_text(report, verbose=1)}")
        return report


def _failure_of_step(report: Report) -> NonFinite:
    skipped = report.run["steps_skipped"]
    text = plain_text(report, quiet=True, verbose=1) or "\n".join(note.message for note in report.errors)
    return _failure(report, f"{text}\n  skipped by the scaler so far: {skipped} steps" if skipped else text)


def _failure(report: Report, text: str) -> NonFinite:
    failure = NonFinite(text, pytrace=False)
    failure.codes = tuple({f.code: None for f in report.findings if f.severity == "error"}) or ("unattributed",)
    return failure


def _listed(
    given: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
) -> Iterable[torch.optim.Optimizer]:
    if given is None:
        return ()
    return given.values() if isinstance(given, Mapping) else (given,)
