"""Birth and cause of the corpus's runs on the device, beside the replay on the CPU with CUDA's casts."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ampdoctor import TrainingRun
from ampdoctor.errors import AmpdoctorError, UserCodeError
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from benchmarks.gpu_check.section import Section
from fixtures.corpus import runs


def measure(device: torch.device, cases: Iterable[str]) -> Section:
    """Diagnose each case on the device and on the CPU."""
    rows, differences, skipped = {}, [], []
    for case in cases:
        if importlib.util.find_spec("transformers") is None and _needs_transformers(case):
            skipped.append(f"{case}: transformers is not installed")
            continue
        row = diagnosed(case, device)
        if "unable" in row:
            skipped.append(f"{case}: its own code does not run there: {row['unable']}")
            continue
        rows[case] = row
        differences += differing(case, rows[case], diagnosed(case, None))
    return Section(rows=rows, differences=tuple(differences), skipped=tuple(skipped))


def diagnosed(case: str, device: torch.device | None) -> dict[str, Any]:
    """What `bisect-nan` says of the case on a device; None for the CPU, with nothing of this check in its way.

    Returns:
        Its verdict, and the cause and place of its worst finding; or `error`, the sentence with which it ended, or
        `unable`, where the case's own code raised it.
    """
    factory = functools.partial(runs.make_run, case) if device is None else functools.partial(run_on, case, device)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that models are built with
        checkpoint = None
        if runs.has_checkpoint(case):
            checkpoint = str(Path(folder) / "checkpoint.pt")
            runs.write_checkpoint(case, checkpoint)
        request = ReplayRequest(factory=factory, checkpoint=checkpoint, device=str(device or "cpu"), policy="cuda")
        try:
            return _row(bisect_nan(request))
        except UserCodeError as error:
            return {"unable": str(error).splitlines()[0]}
        except (AmpdoctorError, RuntimeError) as error:  # of torch's, from the device: named beside what went well
            return {"error": str(error).splitlines()[0]}


def differing(case: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each fact that is another one on the device."""
    for name in sorted({*found, *expected} - {"deterministic"}):
        here, there = found.get(name), expected.get(name)
        if here != there:
            yield f"{case}, {name}: {here} on the device, {there} on the CPU"


def run_on(case: str, device: torch.device) -> TrainingRun:
    """The case, ready for a device: what its loss makes anew (a mask, positions) is made there.

    Its model and batches are made on the CPU, so that they hold the same numbers everywhere.
    """
    run = runs.make_run(case)
    return replace(run, loss=_within(device, run.loss), step=_within(device, run.step))


def _within(device: torch.device, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if function is None:
        return None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with device:
            return function(*args, **kwargs)

    return call


def _row(report: Report) -> dict[str, Any]:
    worst: Finding | None = next((finding for finding in report.findings if finding.severity == "error"), None)
    row: dict[str, Any] = {"verdict": report.verdict, "deterministic": report.run["deterministic"]}
    if worst is None:
        return row
    where = worst.where
    place = {name: getattr(where, name) for name in ("step", "phase", "module", "op", "nonfinite")}
    return {**row, "cause": worst.cause, **place}


def _needs_transformers(case: str) -> bool:
    return "transformers" in (runs.CASES / f"{case}.py").read_text(encoding="utf-8")
