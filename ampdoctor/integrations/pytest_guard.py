"""The fixture `amp_guard`: watches steps of a test, or replays a run, and fails the test with the diagnosis."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ampdoctor.evidence.report import Report
from ampdoctor.hooks.interfaces import describe
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.reports.human import plain_text
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest, WatchRequest
from ampdoctor.workflows.watcher import TrainingWatcher, standing

if TYPE_CHECKING:
    from torch import nn


class NonFinite(pytest.fail.Exception):  # type: ignore[name-defined,misc]  # pytest makes it without annotations
    """A step went non-finite; the message is the diagnosis.

    As pytest's own failures it is no `Exception`, so a training loop's `except Exception` does not hide it.

    Attributes:
        codes: The codes of the findings, each once.
        told: Whether it has already failed its test, so that it is not raised again.
    """

    codes: tuple[str, ...] = ()
    told = False

    __module__ = "builtins"  # the failure's first line then has the bare name, as with pytest's own failures


_SET_ASIDE = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
"""Exceptions for tests that do not count; steps before them count. An `xfail` mark is left to pytest."""


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
    ) -> Iterator[TrainingWatcher]:
        """Watch the user's own steps inside this context.

        A nested context only adds its model and optimizers to the outer watch.

        Args:
            model: The model; without it, models are found when they are called.
            optimizer: The optimizer, or several by name; without it, they are found at their first step.
            scaler: A loss scaler, if it is not torch's own.
            max_skipped: Steps that a scaler may skip in all; None: as many as it takes to settle.

        Raises:
            NonFinite: A step is bad; raised at that step.
        """
        outer = standing()
        if outer is not None:
            outer.meet(model, _listed(optimizer))
            yield outer
            return
        failed: list[NonFinite] = []
        ended_by: list[BaseException] = []

        def stop(report: Report) -> None:
            failed.append(_failure_of_step(report, watch.skipped, ended_by))
            raise failed[-1] from None  # the diagnosis contains the message of the test's own check

        with (
            TemporaryDirectory(prefix="ampdoctor-", ignore_cleanup_errors=True) as folder,
            torch.compiler.set_stance("force_eager"),  # a compiled step would trace the look behind its update
        ):
            request = WatchRequest(
                health=folder,
                script="pytest",
                on_sick="stop",
                look="sync",
                bundle=False,
                test=True,
                most_skipped=max_skipped,
            )
            watch = TrainingWatcher(request, stop, _silent)
            scalers = () if scaler is None else (scaler,)
            with watch.attending(model=model, optimizers=_listed(optimizer), scalers=scalers):
                try:
                    yield watch
                except BaseException as error:
                    if not failed:
                        ended_by.append(error)
                        watch.ended(error)
                    if not (failed and isinstance(error, _SET_ASIDE)):
                        raise
                else:
                    if not failed:
                        watch.ended(None)
        if watch.failure is not None:
            warnings.warn(pytest.PytestWarning(f"the rest of the test was not watched: {watch.failure}"), stacklevel=1)
        if failed and not failed[-1].told:  # the loop caught it; a fixture's context only sees the end of its test
            raise failed[-1]

    def run(self, run: str | Callable[..., TrainingRun], *, steps: int = 8, **options: Any) -> Report:
        """Replay a run as `ampdoctor bisect-nan` does, with cause and fix proven by replay.

        Args:
            run: A factory, or its name (`package.module:function`, `path/to/file.py:function`).
            steps: Optimizer steps to replay.
            options: Further fields of `ampdoctor.ReplayRequest` (`checkpoint`, `precision`, `arguments`, ...).

        Returns:
            The report, if it has no errors.

        Raises:
            NonFinite: A finding is an error; the message is the first finding and the whole report.
            AmpdoctorError: The run cannot be replayed.
        """
        report = bisect_nan(ReplayRequest(factory=run, steps=steps, **options))
        if report.worst() == "error":
            raise _failure(report, plain_text(report, verbose=1))
        return report


def _failure_of_step(report: Report, skipped: int, ended_by: Sequence[BaseException]) -> NonFinite:
    left_out = [note.message for note in report.errors] or [f"not examined: {one.reason}" for one in report.skipped]
    text = plain_text(report, quiet=True, verbose=1) or "\n".join(left_out)
    said = [f"  the test raised: {describe(error)}" for error in ended_by]
    said += [f"  skipped by the scaler so far: {skipped} steps"] if skipped else []
    return _failure(report, "\n".join([text, *said]))


def _failure(report: Report, text: str) -> NonFinite:
    worst = [f"{f.code} {f.name}: {f.message}\n" for f in report.findings[:1]]
    failure = NonFinite("\n".join([*worst, text]), pytrace=False)
    failure.codes = tuple({f.code: None for f in report.findings if f.severity == "error"}) or ("unattributed",)
    return failure


def _listed(
    given: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
) -> Iterable[torch.optim.Optimizer]:
    if given is None:
        return ()
    return given.values() if isinstance(given, Mapping) else (given,)


def _silent(_: str) -> None:
    """Alerts over many steps, and notes, are nothing that a test fails for."""
