"""`profile`: measures in an fp32 replay what half precision would lose at each place, or takes it from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.json_files import parse_json
from ampdoctor.checkpoints.safetensors_file import looks_like_safetensors, read_safetensors
from ampdoctor.diagnosis.replay.gradients import underflow_expected
from ampdoctor.diagnosis.replay.outcome import nonfinite_in_fp32
from ampdoctor.errors import CheckpointError, LimitExceededError, UsageError
from ampdoctor.evidence.log_records import DetailLine, RunLine, StepLine
from ampdoctor.evidence.report import Check, Finding, Report, finding_order, verdict_of
from ampdoctor.evidence.run_facts import GRADIENTS, PROFILE_MARK, SiteKind
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.health.condense import Attempts
from ampdoctor.health.reading.log_files import thinned
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import AMPDOCTOR, FoundLog, find_log
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.ranges.from_log import profile_from_log
from ampdoctor.ranges.profile import FP8, SURE_BELOW, RangeProfile, Shadow, figures, fitted_figures
from ampdoctor.ranges.profile_file import pack, unpack
from ampdoctor.scaling.choose import choose_scale
from ampdoctor.workflows.checkpoint_state import history_findings, not_said_yet, state_findings
from ampdoctor.workflows.measure import measure, not_compared, shadowed
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.output_files import is_run_log, write_whole

if TYPE_CHECKING:
    from ampdoctor.workflows.requests import Progress, ReplayRequest


def range_findings(ranges: RangeProfile, thresholds: Thresholds) -> list[Finding]:
    """Returns the findings that follow from ranges alone; for a bf16 or fp32 run, only whether it is finite."""
    if ranges.nonfinite_steps:
        return [nonfinite_in_fp32(ranges.nonfinite_steps)]
    if ranges.run.precision != "fp16":
        return []
    scale = ranges.run.loss_scale
    activation, weight = (figures(ranges.merged(kind), "fp16", ranges.factor(kind, scale)) for kind in GRADIENTS)
    bf16 = figures(ranges.merged("activation_grad"), "bf16", ranges.factor("activation_grad", 1.0))
    measured = next((s.relative_error for s in ranges.shadows if s.scale == scale), None)
    found = underflow_expected(activation, weight, scale, bf16, thresholds, measured=measured)
    return [] if found is None else [found]


def range_checks(ranges: RangeProfile) -> tuple[Check, ...]:
    """Returns the headline: the share of gradients that flush in fp16, at the run's scale and without, beside bf16."""
    checks = [
        Check(
            name="gradients finite in fp32",
            result="found" if ranges.nonfinite_steps else "ok",
            headroom={"steps": ranges.steps},
        )
    ]
    for kind in GRADIENTS:
        histogram, name = ranges.merged(kind), f"{kind.replace('_', ' ')} underflow, fp16 against bf16"
        if not histogram.counts.any():
            none = "is finite and nonzero" if histogram.numel else "is half"
            checks.append(Check(name=name, result=f"not measured: no such gradient {none}"))
            continue
        checks.append(
            Check(
                name=name,
                result="measured",
                headroom={
                    "fp16": histogram.flushed("fp16", ranges.factor(kind, ranges.run.loss_scale)),
                    "fp16_unscaled": histogram.flushed("fp16", ranges.factor(kind, 1.0)),
                    "bf16": histogram.flushed("bf16", ranges.factor(kind, 1.0)),
                    "loss_scale": ranges.run.loss_scale,
                    "true_zeros": histogram.zeros / histogram.numel,
                },
            )
        )
    return tuple(checks)


# -- the report's section `profile` --

QUANTILES = (0.001, 0.01, 0.5, 0.99)


def profile_section(profile: RangeProfile, recommended: float | None, *, sites: bool = True) -> dict[str, Any]:
    """Returns summary, sites, shadow steps, modules and updates.

    Rows of the summary: `fp16` at the run's loss scale, `fp16_recommended` at the recommended one (if there is one),
    `fp16_unscaled` at a loss scale of 1, `bf16` unscaled, `e4m3fn` and `e5m2` with each tensor scaled to fit. Only
    tensors in the half format count. Each site has the same rows.
    """
    rows = _rows(profile, recommended)
    return {
        "summary": {
            row: {kind: _of_kind(profile, kind, fmt, at) for kind in GRADIENTS} for row, (fmt, at) in rows.items()
        },
        "sites": [_site(profile, index, rows) for index in range(len(profile.sites))] if sites else [],
        "shadows": [_shadow(profile, shadow) for shadow in profile.shadows],
        "modules": [asdict(module) for module in profile.modules] if sites else [],
        "updates": [asdict(update) for update in profile.updates] if sites else [],
        "steps": profile.steps,
        "loss_scale": profile.run.loss_scale,
        "recommended_scale": recommended,
    }


def _rows(profile: RangeProfile, recommended: float | None) -> dict[str, tuple[str, float]]:
    rows = {"fp16": ("fp16", profile.run.loss_scale), "fp16_unscaled": ("fp16", 1.0), "bf16": ("bf16", 1.0)}
    if recommended is not None:
        rows["fp16_recommended"] = ("fp16", recommended)
    return rows | {fmt: (fmt, 1.0) for fmt in FP8}


def _of_kind(profile: RangeProfile, kind: SiteKind, fmt: str, scale: float) -> dict[str, float | None]:
    return _figures(profile, profile.of_kind(kind), profile.merged(kind), fmt, profile.factor(kind, scale))


def _figures(
    profile: RangeProfile, indices: Sequence[int], merged: Histogram, fmt: str, factor: float
) -> dict[str, float | None]:
    """Returns what a format does to these sites; None for a share of no values, which is not 0 %."""
    found = fitted_figures(profile, indices, fmt) if fmt in FP8 else figures(merged, fmt, factor)
    nothing = {} if merged.counts.any() else dict.fromkeys(("flushed", "subnormal", "overflowed", "relative_error"))
    return asdict(found) | nothing


def _site(profile: RangeProfile, index: int, rows: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    site, histogram = profile.sites[index], profile.histograms[index]
    base = 1.0 / profile.factor(site.kind, 1.0)  # magnitudes are shown as if the loss were unscaled
    return {
        **asdict(site.place),
        "half": site.half,
        "weight": site.weight,
        "module": site.module,
        "histogram": histogram.to_dict(),
        "amax_by_step": [float(value) for value in profile.series.amax[:, index]],
        "numel": histogram.numel,
        "zeros": histogram.zeros,
        "nonfinite": histogram.nans + histogram.pos_infs + histogram.neg_infs,
        "amax": _over(histogram.amax, base),
        "amin": _over(histogram.amin, base),
        "quantiles": {f"q{q:g}": _over(histogram.quantile(q), base) for q in QUANTILES},
        "formats": {
            row: _figures(profile, [index], histogram, fmt, profile.factor(site.kind, scale))
            for row, (fmt, scale) in rows.items()
        },
    }


def _shadow(profile: RangeProfile, shadow: Shadow) -> dict[str, Any]:
    def share(counts: NDArray[Any], indices: Sequence[int]) -> float | None:
        nonzero = int(shadow.nonzero[indices].sum())
        return float(counts[indices].sum()) / nonzero if nonzero else None

    seen = [index for index in profile.half_gradients() if shadow.nonzero[index]]
    lossy = any(
        (share(shadow.predicted, [i]) or 0.0) > SURE_BELOW for i in seen if profile.sites[i].kind == "activation_grad"
    )

    def beside(kind: SiteKind, indices: Sequence[int]) -> dict[str, Any]:
        return {
            "measured": share(shadow.flushed, indices),
            "predicted": share(shadow.predicted, indices),
            "lower_bound": lossy and kind == "weight_grad",
        }

    return {
        "scale": shadow.scale,
        "steps": list(shadow.steps),
        "flushed": {kind: beside(kind, profile.of_kind(kind)) for kind in GRADIENTS},
        "relative_error": {"measured": shadow.relative_error, "predicted": shadow.predicted_error},
        "sites": [
            {
                **asdict(profile.sites[index].place),
                "nonzero": int(shadow.nonzero[index]),
                **beside(profile.sites[index].kind, [index]),
            }
            for index in seen
        ],
    }


def _over(value: float | None, base: float) -> float | None:
    return None if value is None else value / base


# -- ranges from a run's log, in place of a saved profile --

NOTE_ON_LOGS = (
    "the ranges are those that the run has measured of itself: what its gradients had lost at the run's own scale "
    "before they were counted is not in them"
)
"""For a report that rests on a log."""


MAX_STEPS = 100_000
"""Steps of a log that are kept; more are thinned evenly."""
MAX_DETAILS = 20_000
"""The same for details: with 64 tensors each, 300 details of 4,000 tensors."""
_Line = TypeVar("_Line", StepLine, DetailLine)


def ranges_of_log(path: str) -> RangeProfile:
    """Returns the ranges in a run's log, its folder or one of its files; raises UsageError where there are none."""
    try:
        found = find_log(path)
        if found.kind is not AMPDOCTOR:
            raise UsageError(
                f"{path} holds no log of a run: `ampdoctor recommend` takes a factory, a profile or such a log"
            )
        details, steps = _lines(found, DetailLine, MAX_DETAILS), _lines(found, StepLine, MAX_STEPS)
    except CheckpointError as error:
        raise UsageError(f"the log cannot be read: {error}") from None
    try:
        return profile_from_log(details, [line for _, line in steps])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _lines(found: FoundLog, kind: type[_Line], most: int) -> list[tuple[RunLine, _Line]]:
    """Returns lines of the first rank that no rollback or restart has undone, each with the header before it."""
    groups = Attempts()

    def lines() -> Iterator[tuple[int, RunLine, _Line]]:
        run, rank = RunLine(name=""), None
        for whole in found.lines(ReadIssues()):
            stamp, line = whole.stamp, whole.line
            rank = stamp.rank if rank is None else rank
            if stamp.rank != rank:
                continue
            if isinstance(line, RunLine):
                run = line
            elif isinstance(line, StepLine | DetailLine):
                groups.begins(groups.of(stamp), line.step)
                if isinstance(line, kind):
                    yield groups.of(stamp), run, line

    kept = thinned(lines(), most)
    return [(run, line) for group, run, line in kept if line.step < groups.undone_from(group)]


# -- a profile as one file: safetensors for the arrays, JSON in its header for the rest, and a checksum over both --

MAX_PROFILE_BYTES = 1 << 30
"""A profile of 1,000 modules and 50 steps has about 50 MB."""
_CHECKSUM = "sha256"
_HINT = "`ampdoctor profile FACTORY --save FILE` writes one"


def write_profile(file: str, profile: RangeProfile) -> None:
    """Write a profile completely or not at all; raises OutputError where it cannot be written."""
    arrays, facts = pack(profile)
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole(file, save(plain, metadata={PROFILE_MARK: text, _CHECKSUM: _checksum(plain, text)}))


def read_profile(path: str) -> RangeProfile:
    """Read a file of `write_profile`, executing nothing in it; raises UsageError for other or damaged files."""
    try:
        with RegularFile(Path(path), path) as file:
            if file.size > MAX_PROFILE_BYTES:
                raise UsageError(f"{path} is larger than any profile ({MAX_PROFILE_BYTES} bytes)")
            head = file.head(16)
            if not looks_like_safetensors(head):
                what = "a report, not a profile" if head.lstrip()[:1] == b"{" else "no profile"
                raise UsageError(f"{path} is {what}: {_HINT}")
            content = read_safetensors(file)
            facts, checksum = content.metadata.get(PROFILE_MARK), content.metadata.get(_CHECKSUM)
            if facts is None:
                raise UsageError(f"{path} is a safetensors file without a profile in it: {_HINT}")
            arrays = {name: stored.load().numpy() for name, stored in content.tensors.items()}
            file.require_unchanged()
    except CheckpointError as error:
        raise UsageError(f"the profile cannot be read: {error}") from None
    if checksum != _checksum(arrays, facts):
        raise UsageError(f"{path} was changed after it was written: its checksum does not match")
    try:
        return unpack(arrays, parse_json(facts.encode("utf-8", "surrogatepass"), path, strict=True))
    except (UsageError, LimitExceededError) as error:
        raise UsageError(f"the profile {path} cannot be read: {error}") from None
    except ValueError:
        raise UsageError(f"the profile {path} cannot be read: its facts are no JSON") from None


def _checksum(arrays: Mapping[str, NDArray[Any]], facts: str) -> str:
    """Returns the SHA-256 of everything. It finds accidents and edits; `unpack` checks the form."""
    digest = hashlib.sha256(facts.encode("utf-8", "surrogatepass"))
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


# -- the command --


def profile(request: ReplayRequest, *, save: str | None = None, progress: Progress | None = None) -> Report:
    """Measure gradients, activations and weights over a run's steps, and some of these steps in half precision.

    Args:
        request: What to replay; `steps` defaults to 50, or as many as there are batches.
        save: The file to which the profile is written, if any.
        progress: Called after each step.

    Returns:
        The report. Its findings are notes and warnings, except for a run that is not finite in fp32, and for what scan
        says of the checkpoint's state.

    Raises:
        AmpdoctorError: The run cannot be replayed, or the file cannot be written; one sentence says why.
    """
    with open_replay(request) as replay:
        session = replay.session()
        start = session.snapshot()
        found = state_findings(replay, session, request.thresholds)
        try:
            taken = measure(session, start, request.steps, progress, factory=replay.factory.name)
            ranges = taken.ranges
            if not ranges.nonfinite_steps:
                choice = choose_scale(ranges, request.thresholds)
                fits = [] if choice is None else [choice.settings.scale]  # the recommended one
                scales = tuple(dict.fromkeys([ranges.run.loss_scale, *fits]))
                ranges, unlike = shadowed(session, taken, scales, progress)
                if unlike is not None:
                    why = not_compared(unlike)
                    taken.notes.append(f"what fp16 does to these gradients was not measured: {why}")
        finally:
            start.restore()
            session.close()
        replay.notes.extend(taken.notes)
        run = {**replay.described(session, ranges.steps), **_saved(save), "notes": list(dict.fromkeys(replay.notes))}
        target = request.described(replay.factory.name)
        found += not_said_yet(history_findings(replay), found)
    if save is not None:
        write_profile(save, ranges)
    return report_of(ranges, target, run, request.thresholds, found, expect_failure=request.expect_failure)


def profile_from_file(path: str, *, save: str | None = None, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Report:
    """Show a saved profile, or the ranges in a run's log, and write them to `save`; may raise AmpdoctorError."""
    ranges = ranges_in(path)
    if save is not None:
        write_profile(save, ranges)
    target = {"profile": path, "factory": ranges.run.factory or None}
    return report_of(ranges, target, {**run_of_file(path, ranges), **_saved(save)}, thresholds)


def _saved(file: str | None) -> dict[str, str]:
    return {} if file is None else {"saved": file}


def ranges_in(path: str) -> RangeProfile:
    """Returns a saved profile, or the ranges in a run's log."""
    return ranges_of_log(path) if is_run_log(path) else read_profile(path)


def run_of_file(path: str, ranges: RangeProfile) -> dict[str, Any]:
    """Returns the report's `run` section if nothing ran."""
    facts = ranges.run
    notes = {"notes": [NOTE_ON_LOGS]} if is_run_log(path) else {}
    return {"precision": facts.precision, "autocast": facts.autocast, "steps": ranges.steps, "replays": 0, **notes}


def report_of(
    ranges: RangeProfile,
    target: Mapping[str, Any],
    run: Mapping[str, Any],
    thresholds: Thresholds,
    of_the_state: Sequence[Finding] = (),
    *,
    expect_failure: bool = False,
) -> Report:
    """Returns the report on a profile, whatever its source; `of_the_state` are findings before the first step."""
    own = range_findings(ranges, thresholds)
    findings = tuple(sorted([*own, *not_said_yet(of_the_state, own)], key=finding_order))
    choice = None if ranges.nonfinite_steps else choose_scale(ranges, thresholds)
    return Report(
        command="profile",
        target=target,
        run=run,
        verdict=verdict_of(findings, expect_failure=expect_failure),
        findings=findings,
        checks=range_checks(ranges),
        profile=profile_section(ranges, None if choice is None else choice.settings.scale),
        thresholds=thresholds.listed(),
    )
