"""A folder of many checkpoints of one training: the first sick one by halving, and the trend over what was read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampdoctor.bisect.first_bad import first_bad
from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.family import Member
from ampdoctor.checkpoints.run_log import loss_until
from ampdoctor.diagnosis.change_rules import cast_by_autocast
from ampdoctor.diagnosis.checkpoint_rules import is_mask
from ampdoctor.diagnosis.trend_rules import trend_findings
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.checkpoint import CheckpointSummary, LogEntry
from ampdoctor.evidence.report import ErrorNote, Report, Skipped, Verdict, finding_order
from ampdoctor.evidence.trend import Largest, TrendPoint
from ampdoctor.workflows.examining import Examined

_STATE = ("state:", "optimizer_state:", "scaler_state")
"""Ops of findings that a checkpoint's own values are sick; a log beside them tells of what came before."""
_UNIT = {"step": "step", "epoch": "epoch", "number": "save"}


MAX_UNDATED = 4
"""Members of an unknown time that are read without being asked for: the averaged and the best weights of a run are
what is shipped of it, and there are a few of them."""
_Look = Callable[[Checkpoint, str], Examined]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A member that was opened.

    Attributes:
        member: Which.
        report: Its report, with paths relative to the family's folder; None where it could not be read.
        point: Its figures.
        examined: Report and numbers as the member itself has them.
        error: Why it could not be read.
    """

    member: Member
    report: Report | None = None
    point: TrendPoint | None = None
    examined: Examined | None = None
    error: CheckpointError | None = None

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Shapes of its matrices."""
        tensors = self.examined.summary.tensors if self.examined is not None else ()
        return {t.shape for t in tensors if t.role == "weight" and len(t.shape) > 1}

    @property
    def sick(self) -> bool:
        """Whether its weights, buffers, moments or scaler are."""
        return self.report is not None and any(
            f.severity == "error" and (f.where.op or "").startswith(_STATE) for f in self.report.findings
        )


class _Reader:
    """Reads members, each at most once."""

    def __init__(self, family: Sequence[Member], look: _Look) -> None:
        self.family = family
        self.seen: dict[int, _Seen] = {}
        self._look = look

    def __call__(self, index: int) -> _Seen:
        if index not in self.seen:
            self.seen[index] = _see(self.family[index], self._look)
        return self.seen[index]

    def in_order(self) -> list[_Seen]:
        """What was read, in the order of the training."""
        return [self.seen[index] for index in sorted(self.seen)]


def scan_family(
    name: str,
    family: Sequence[Member],
    look: _Look,
    *,
    log: tuple[LogEntry, ...] = (),
    every_member: bool = False,
) -> Report:
    """Examine as many checkpoints of a training as it takes.

    The last one is read. If it is sick, the first sick one is searched by halving, which together reads at most
    ceil(log2(n)) + 1 of n; if it is healthy, the first and evenly spread ones are read for the trend, ceil(log2(n)) + 2
    in all. A member that cannot be read is an error of the report, and the search goes on around it. Up to
    `MAX_UNDATED` of which nothing tells when they were saved (`best.pt`, `ema.pt`) are read beside these.

    Args:
        name: The folder's name.
        family: Its members, in order.
        look: Examines one of them, given its name.
        log: The run's training log, judged once, beside the checkpoint that the report is about, where that has not
            a longer one.
        every_member: Read all of them.

    Returns:
        The findings and the verdict of the first sick one, of the last where none is, and what the trend shows.

    Raises:
        CheckpointError: Not one of them can be read.
    """
    reader = _Reader([member for member in family if member.placed], look)
    unplaced = [member for member in family if not member.placed]
    if every_member:
        for index in range(len(reader.family)):
            reader(index)
    else:
        _search(reader)
    read = reader.in_order()
    beside, left_out = _beside(unplaced, read, look, every_member=every_member)
    shown = next((s for s in (*read, *beside) if s.sick), None)
    shown = shown or _fullest([s for s in read if s.report is not None], reader.family)
    shown = shown or next((s for s in beside if s.report is not None), None)
    if shown is None or shown.report is None:
        raise next(s.error for s in (*read, *beside) if s.error is not None)
    points, unit = _on_one_axis(_with_losses(read, log), reader.family)
    report = _beside_log(shown, log)
    errors = tuple(note for s in (*read, *beside) for note in _errors_of(s))
    findings = tuple(sorted((*report.findings, *trend_findings(points, unit)), key=finding_order))
    sick = any(finding.severity == "error" for finding in findings)
    verdict: Verdict = "sick" if sick else "inconclusive" if errors else "healthy"
    return replace(
        report,
        target=_target(name, family, read, beside, shown),
        verdict=verdict,
        complete=not errors,
        findings=findings,
        skipped=(*report.skipped, *left_out),
        errors=errors,
        trend={
            "unit": unit,
            **_searched(read, beside, len(family), shown),
            "points": [_figures(point) for point in points],
        },
    )


def _beside(
    unplaced: Sequence[Member], read: Sequence[_Seen], look: _Look, *, every_member: bool
) -> tuple[list[_Seen], list[Skipped]]:
    """What is read of the members of an unknown time, and what is not: other things lie in a run's folder, too."""
    if every_member:
        return [_see(member, look) for member in unplaced], []
    known = {shape for seen in read for shape in seen.shapes}
    examined: list[_Seen] = []
    skipped: list[Skipped] = []

    def akin(checkpoint: Checkpoint, name: str) -> Examined:
        if known and known.isdisjoint(ref.shape for ref in checkpoint):
            raise CheckpointError("it holds no matrix of the checkpoints' shapes")
        return look(checkpoint, name)

    in_turn = sorted(unplaced, key=lambda m: not m.alias)
    for member in in_turn[:MAX_UNDATED]:
        seen = _see(member, akin)
        if seen.error is None or member.alias:
            examined.append(seen)
        else:
            skipped.append(Skipped(what=member.name, reason=f"not read as a checkpoint: {seen.error}"))
    rest = in_turn[MAX_UNDATED:]
    skipped += [Skipped(what=m.name, reason="nothing tells when it was saved; --all reads it") for m in rest]
    return examined, skipped


def _fullest(healthy: Sequence[_Seen], family: Sequence[Member]) -> _Seen | None:
    """The last one; but the bare model that a training leaves behind says less than its last checkpoint."""
    last = healthy[-1] if healthy else None
    before = [s for s in healthy if s.member in family[:-1]]
    return before[-1] if last is not None and before and last.member.final else last


def _search(reader: _Reader) -> None:
    """Read what it takes to find the first sick member and its healthy predecessor, or else to see a trend."""
    count = len(reader.family)
    last = next((i for i in reversed(range(count)) if reader(i).report is not None), None)
    if last is None:
        return
    if not reader(last).sick:
        own = [i for i in range(last + 1) if not (reader.family[i].final or reader.family[i].alias)]
        newest = own[-1] if own else last  # `last.pt` stands in for it, and may be whole where it is not
        for index in _spread(newest + 1, _budget(last + 1) - (newest < last)):
            reader(index)
    sick = [i for i, seen in reader.seen.items() if seen.sick]
    if sick:
        top = min(sick)
        healthy = [i for i, seen in reader.seen.items() if i < top and seen.report is not None]
        _halve(reader, max(healthy, default=-1), top)


def _halve(reader: _Reader, low: int, top: int) -> None:
    """Between a healthy member (-1: none is known) and a sick one: read until two neighbours part the two."""
    positions = range(low + 1, top + 1)

    def bad(at: int) -> bool:
        """Whether a position is sick; one that cannot be read stands with the next that can."""
        return next((seen.sick for i in positions[at:] if (seen := reader(i)).report is not None), True)

    found = first_bad([(1 << at) - 1 for at in range(len(positions))], bad)
    first = positions[found.suspects[0]]
    for index in range(first - 1, low, -1):
        if reader(index).report is not None:
            break


def _budget(count: int) -> int:
    """Members of a healthy training that are read: as many as a search could take, and one more."""
    return math.ceil(math.log2(count)) + 2


def _spread(count: int, wanted: int) -> list[int]:
    """First, last and evenly spread positions."""
    wanted = min(count, wanted)
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _see(member: Member, look: _Look) -> _Seen:
    try:
        with member.open() as checkpoint:
            examined = look(checkpoint, member.name)
    except CheckpointError as error:
        return _Seen(member, error=error)
    except Exception as error:  # noqa: BLE001 - a mistake of ours over one member must not take the others with it
        kind = type(error).__name__
        said = f"{member.name} was not examined: {kind} inside ampdoctor; scan it by itself to see where."
        return _Seen(member, error=CheckpointError(said))
    return _Seen(member, _placed_in_folder(examined.report, member), _point(member, examined.summary), examined)


def _placed_in_folder(report: Report, member: Member) -> Report:
    """The report with paths relative to the family's folder."""

    def path(file: str | None) -> str | None:
        return f"{member.inside}/{file}" if file and member.inside else file

    return replace(
        report,
        findings=tuple(replace(f, where=replace(f.where, file=path(f.where.file))) for f in report.findings),
        skipped=tuple(replace(s, what=path(s.what) or "") for s in report.skipped),
        errors=tuple(replace(e, what=path(e.what) or "") for e in report.errors),
    )


def _beside_log(shown: _Seen, log: tuple[LogEntry, ...]) -> Report:
    """The report of a member, judged beside the run's log where that tells more than its own."""
    if shown.report is None or shown.examined is None:
        raise ValueError("a member that was not examined has no report")
    if len(log) <= len(shown.examined.summary.log):
        return shown.report
    return _placed_in_folder(shown.examined.with_log(log).report, shown.member)


def _with_losses(read: Sequence[_Seen], log: tuple[LogEntry, ...]) -> list[TrendPoint]:
    """The points; the loss of one that has none is the last that was logged before it, and after the one before it."""
    points: list[TrendPoint] = []
    before = latest = -1
    for seen in read:
        point = seen.point
        if point is None:
            continue
        step = _step(seen) if point.step is not None or seen.member.unit == "step" else None
        if step is not None and step > latest:  # `last.pt` has the loss of the save that it repeats
            before, latest = latest, step
        if point.loss is None and step is not None:
            point = replace(point, loss=loss_until(log, step, before))
        points.append(point)
    return points


def _point(member: Member, summary: CheckpointSummary) -> TrendPoint:
    losses = [e.loss for e in summary.log if e.loss is not None and e.step <= (summary.global_step or e.step)]
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


def _on_one_axis(points: Sequence[TrendPoint], family: Sequence[Member]) -> tuple[list[TrendPoint], str]:
    """The points with steps that mean the same in all: as stored, or else as the names have them."""
    named = {member.name: member.step for member in family}
    known = [point.step for point in points if point.step is not None]
    if known == sorted(known) and all(point.step is not None or named[point.name] is None for point in points):
        return list(points), "step"
    return [replace(point, step=named[point.name]) for point in points], _UNIT[family[0].unit]


def _errors_of(seen: _Seen) -> Iterator[ErrorNote]:
    if seen.report is not None:
        yield from seen.report.errors
    elif seen.error is not None:
        kind = "limit" if isinstance(seen.error, LimitExceededError) else "unreadable"
        yield ErrorNote(what=seen.member.name, kind=kind, message=str(seen.error))


def _target(
    name: str, family: Sequence[Member], read: Sequence[_Seen], beside: Sequence[_Seen], shown: _Seen
) -> Mapping[str, Any]:
    report = shown.report
    known = report.target if report is not None else {}
    stored = known.get("global_step")
    named = shown.member.step if shown.member.unit == "step" else None
    return {
        "path": name,
        "format": f"{len(family)} checkpoints",
        "examined": {"name": shown.member.name, "step": _step(shown)},
        "global_step": stored if stored is not None else named,
        "tensors": known.get("tensors"),
        "bytes": sum(s.report.target["bytes"] for s in (*read, *beside) if s.report is not None),
        "count": len(family),
        "members": [
            {"name": s.member.name, "step": _step(s), "verdict": _verdict(s), "sick": s.sick} for s in (*read, *beside)
        ],
    }


def _verdict(seen: _Seen) -> str:
    return "unreadable" if seen.report is None else seen.report.verdict


def _step(seen: _Seen) -> int | None:
    stored = seen.point.step if seen.point is not None else None
    return stored if stored is not None else seen.member.step


def _searched(read: Sequence[_Seen], beside: Sequence[_Seen], count: int, shown: _Seen) -> Mapping[str, Any]:
    """What the search came to, and the sentence that says so."""
    readable = [s for s in read if s.report is not None]
    first = shown if shown.sick else None
    before = readable[: readable.index(first)] if first in readable else []
    if first is None:
        said = f"the state of none of those read is sick; what follows is of {_called(shown)}"
    elif first not in readable:
        others = f"; of the {len(readable)} in order that were read none is" if readable else ""
        said = f"{_called(first)} is sick, and nothing tells when it was saved{others}"
    elif before:
        said = f"the first sick one is {_called(first)}; {_called(before[-1])} before it is healthy"
    else:
        said = f"the first sick one is {_called(first)}; there is none to read before it"
    turned = [(a, b) for at, a in enumerate(readable) if a.sick for b in readable[at + 1 :] if not b.sick]
    if turned:
        earlier, later = turned[0]
        said += f". Sickness comes and goes: {_called(earlier)} is sick and {_called(later)} after it is not"
        if len(read) + len(beside) < count:
            said += "; there may be an earlier one (--all reads every one)"
    return {
        "summary": f"{said} ({len(read) + len(beside)} of {count} read)",
        "first_sick": first.member.name if first is not None else None,
        "last_healthy": before[-1].member.name if before else None,
        "monotone": not turned,
    }


def _called(seen: _Seen) -> str:
    step = _step(seen)
    told = step is None or seen.member.unit == "epoch" or str(step) in seen.member.name
    return seen.member.name if told else f"{seen.member.name} (step {step})"


def _figures(point: TrendPoint) -> Mapping[str, Any]:
    return {
        "name": point.name,
        "step": point.step,
        "scale": point.scale,
        "loss": point.loss,
        "roles": {
            role.role: {
                "amax": role.amax,
                "fp16_flushed": next((c.flushed for c in role.casts if c.format == "fp16"), None),
            }
            for role in point.roles
        },
    }
