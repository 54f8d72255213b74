"""A folder of many checkpoints of one training: the report on the first sick one, and the trend over those read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ampdoctor.checkpoints.family import Member
from ampdoctor.checkpoints.run_log import loss_until
from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.several.growing_range import cast_by_autocast
from ampdoctor.diagnosis.tensors.tensor_finding import is_mask
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary, LogEntry
from ampdoctor.evidence.of_checkpoints.trend import Largest, Trend, TrendPoint
from ampdoctor.evidence.report import ErrorNote, Finding, Report, finding_order, verdict_of
from ampdoctor.evidence.report.scans import RoleFigures, TrendFigures, TrendSection, TrendUnit
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.workflows.opening.request import SetAside, keep_all
from ampdoctor.workflows.scanning.family_search import Look, Read, Seen, placed_in_folder, read_family

_UNIT: Mapping[str, TrendUnit] = {"step": "step", "epoch": "epoch", "number": "save"}


def scan_family(
    name: str,
    family: Sequence[Member],
    look: Look,
    *,
    log: tuple[LogEntry, ...] = (),
    every_member: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    set_aside: SetAside = keep_all,
) -> Report:
    """Examine as many checkpoints of a training as needed.

    The last one is read. If it is sick, the first sick one is searched by halving: at most ceil(log2(n)) + 1 of n are
    read in all. If it is healthy, the first and evenly spread ones are read for the trend, ceil(log2(n)) + 2 in all. If
    some sickness is set aside, two are searched: the first sick one, and the first that is sick in another way, which
    takes up to ceil(log2(n)) + 1 more; so does the first whose loss scale has collapsed, where that harms too little to
    be sickness. A member that cannot be read is an error of the report, and the search goes on
    around it. Up to `MAX_UNDATED` members of unknown time (`best.pt`, `ema.pt`) are read as well.

    Args:
        name: The folder's name.
        family: Its members, in order.
        look: Examines one of them, given its name.
        log: The run's training log. It is judged once, beside the checkpoint that the report is about, unless that has
            a longer log.
        every_member: Read all of them.
        thresholds: For the trend: what counts as grown, and as falling.
        set_aside: Sickness that it sets aside is passed over; a decision on one checkpoint does not hold for the next.

    Returns:
        The findings and the verdict of the first sick one, or of the last if none is sick, and the trend.

    Raises:
        CheckpointError: None of them can be read.
    """
    read = read_family(family, look, every_member=every_member, set_aside=set_aside)
    placed = [member for member in family if member.placed]
    shown = next((seen for seen in read.all if seen.counts), None)
    shown = shown or next((seen for seen in read.all if seen.sick), None)
    shown = shown or _fullest([seen for seen in read.in_order if seen.report is not None], placed)
    shown = shown or next((seen for seen in read.beside if seen.report is not None), None)
    if shown is None or shown.report is None:
        raise next(seen.error for seen in read.all if seen.error is not None)
    points, unit = _on_one_axis(_with_losses(read.in_order, log), placed)
    report = _beside_log(shown, log)
    errors = tuple(note for seen in read.all for note in _errors_of(seen))
    findings = tuple(sorted((*report.findings, *judge(Trend(points=points, unit=unit), thresholds)), key=finding_order))
    return replace(
        report,
        target=_target(name, family, read, shown),
        verdict=verdict_of(findings, settled=not errors),
        complete=not errors,
        findings=findings,
        skipped=(*report.skipped, *read.left_out),
        errors=errors,
        trend=_trend(unit, points, read, len(family), shown),
        elsewhere=tuple(_decided(seen) for seen in read.all if seen is not shown),
    )


def _decided(seen: Seen) -> tuple[Finding, ...]:
    """What was found in a member, as grave as somebody has decided that it is."""
    if seen.report is None or seen.left is None:
        return ()
    own = {finding.fingerprint for finding in seen.report.findings}  # and no ignore that has outlived what it is for
    return tuple(finding for finding in seen.left.found if finding.fingerprint in own)


def _fullest(healthy: Sequence[Seen], family: Sequence[Member]) -> Seen | None:
    """Returns the last one, unless it is the bare model that a training leaves: its last checkpoint says more."""
    last = healthy[-1] if healthy else None
    before = [s for s in healthy if s.member in family[:-1]]
    return before[-1] if last is not None and before and last.member.final else last


def _beside_log(shown: Seen, log: tuple[LogEntry, ...]) -> Report:
    """Returns a member's report, judged beside the run's log if that says more than the member's own."""
    if shown.report is None or shown.examined is None:
        raise ValueError("a member that was not examined has no report")
    if len(log) <= len(shown.examined.summary.log):
        return shown.report
    return placed_in_folder(shown.examined.with_log(log).report, shown.member)


def _with_losses(read: Sequence[Seen], log: tuple[LogEntry, ...]) -> list[TrendPoint]:
    """Returns the points; a point without a loss gets the last one logged before it and after the previous point."""
    points: list[TrendPoint] = []
    before = latest = -1
    for seen in read:
        if seen.examined is None:
            continue
        point = _point(seen.member, seen.examined.summary)
        step = seen.step if point.step is not None or seen.member.unit == "step" else None
        if step is not None and step > latest:  # `last.pt` has the loss of the checkpoint that it repeats
            before, latest = latest, step
        if point.loss is None and step is not None:
            point = replace(point, loss=loss_until(log, step, before))
        points.append(point)
    return points


def _point(member: Member, summary: CheckpointSummary) -> TrendPoint:
    until = math.inf if summary.global_step is None else summary.global_step
    losses = [e.loss for e in summary.log if e.loss is not None and e.step <= until]
    return TrendPoint(
        name=member.name,
        step=summary.global_step,
        roles=summary.roles,
        scale=summary.scalers[0].scale if summary.scalers else None,
        loss=losses[-1] if losses else None,
        largest={
            f"{t.group}.{t.name}" if t.group else t.name: Largest(
                amax=t.amax,
                cast_by_autocast=cast_by_autocast(t.role, t.shape, t.dtype),
                module=t.module,
                entry=t.entry,
                file=f"{member.inside}/{t.file}" if member.inside else t.file,
            )
            for t in summary.tensors
            if t.role in {"weight", "buffer", "ema"} and t.amax is not None and not is_mask(t)
        },
    )


def _on_one_axis(points: Sequence[TrendPoint], family: Sequence[Member]) -> tuple[list[TrendPoint], TrendUnit]:
    """Returns the points with steps of one meaning: as stored, or else as in the names."""
    named = {member.name: member.step for member in family}
    known = [point.step for point in points if point.step is not None]
    if known == sorted(known) and all(point.step is not None or named[point.name] is None for point in points):
        return list(points), "step"
    return [replace(point, step=named[point.name]) for point in points], _UNIT[family[0].unit]


def _errors_of(seen: Seen) -> Iterator[ErrorNote]:
    if seen.report is not None:
        yield from seen.report.errors
    elif seen.error is not None:
        kind = "limit" if isinstance(seen.error, LimitExceededError) else "unreadable"
        yield ErrorNote(what=seen.member.name, kind=kind, message=str(seen.error))


def _target(name: str, family: Sequence[Member], read: Read, shown: Seen) -> Mapping[str, Any]:
    report = shown.report
    known = report.target if report is not None else {}
    stored = known.get("global_step")
    named = shown.member.step if shown.member.unit == "step" else None
    return {
        "path": name,
        "format": f"{len(family)} checkpoints",
        "examined": {"name": shown.member.name, "step": shown.step},
        "global_step": stored if stored is not None else named,
        "tensors": known.get("tensors"),
        "bytes": sum(s.report.target["bytes"] for s in read.all if s.report is not None),
        "count": len(family),
        "members": list(map(_member, read.all)),
    }


def _member(seen: Seen) -> dict[str, Any]:
    row = {"name": seen.member.name, "step": seen.step, "verdict": _verdict(seen), "sick": seen.sick}
    return {**row, "collapsed": True} if seen.collapsed else row


def _verdict(seen: Seen) -> str:
    return "unreadable" if seen.report is None else seen.report.verdict


def _trend(unit: TrendUnit, points: Sequence[TrendPoint], read: Read, count: int, shown: Seen) -> TrendSection:
    """Returns the search's result, and the sentence that says so."""
    readable = [s for s in read.in_order if s.report is not None]
    first = shown if shown.sick else None
    before = readable[: readable.index(first)] if first in readable else []
    if first is None:
        said = f"the state of none of those read is sick; what follows is of {_called(shown)}"
    elif first not in readable:
        others = f"; of the {len(readable)} in order that were read none is" if readable else ""
        said = f"{_called(first)} is sick, and nothing tells when it was saved{others}"
    elif not first.counts:
        said = f"{_called(first)} is sick, and all of it has been set aside; nothing else is in those read"
    elif any(seen.sick for seen in before):
        said = f"{_called(first)} is the first that is sick in a way that has not been set aside; {_begun(readable)}"
    else:
        said = _begun(readable)
    ahead = before if first is not None else readable
    collapsed, recovered = _collapse(ahead)
    if collapsed is not None:
        said += f". In {_called(ahead[collapsed])} the loss scale has collapsed"
    if collapsed is not None and recovered is not None:
        said += f", and in {_called(ahead[recovered])} it has recovered"
        collapsed = None
    elif collapsed is not None:
        said += f"; {_called(ahead[collapsed - 1])} is before that" if collapsed else ", and none is read before it"
    turned = [(a, b) for at, a in enumerate(readable) if a.sick for b in readable[at + 1 :] if not b.sick]
    if turned:
        earlier, later = turned[0]
        said += f". Sickness comes and goes: {_called(earlier)} is sick and {_called(later)} after it is not"
        if len(read.all) < count:
            said += "; there may be an earlier one (--all reads every one)"
    return TrendSection(
        unit=unit,
        points=tuple(map(_figures, points)),
        summary=f"{said} ({len(read.all)} of {count} read)",
        first_sick=first.member.name if first is not None else None,
        last_healthy=next((s.member.name for s in reversed(ahead[:collapsed]) if not s.sick), None)
        if first is not None or collapsed is not None
        else None,
        monotone=not turned,
    )


def _collapse(seen: Sequence[Seen]) -> tuple[int | None, int | None]:
    """Returns where the loss scale last collapsed, and where it was next at 1 or above; None where neither was seen."""
    collapsed = recovered = None
    for at, one in enumerate(seen):
        if one.collapsed and (collapsed is None or recovered is not None):
            collapsed, recovered = at, None
        elif one.well_scaled and collapsed is not None and recovered is None:
            recovered = at
    return collapsed, recovered


def _begun(readable: Sequence[Seen]) -> str:
    """Returns where sickness begins among those that were read."""
    at = next(at for at, seen in enumerate(readable) if seen.sick)
    health = "healthy but for its loss scale" if at and readable[at - 1].collapsed else "healthy"
    before = f"{_called(readable[at - 1])} before it is {health}" if at else "there is none to read before it"
    return f"the first sick one is {_called(readable[at])}; {before}"


def _called(seen: Seen) -> str:
    step = seen.step
    told = step is None or seen.member.unit == "epoch" or str(step) in seen.member.name
    return seen.member.name if told else f"{seen.member.name} (step {step})"


def _figures(point: TrendPoint) -> TrendFigures:
    return TrendFigures(
        name=point.name,
        step=point.step,
        scale=point.scale,
        loss=point.loss,
        roles={
            role.role: RoleFigures(
                amax=role.amax, fp16_flushed=next((c.flushed for c in role.casts if c.format == "fp16"), None)
            )
            for role in point.roles
        },
    )
