"""A folder of many checkpoints of one training: which are read, the first sick one, and the trend."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from ampdoctor.checkpoints.checkpoint import Checkpoint
from ampdoctor.checkpoints.series import SavedCheckpoint
from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.scan.between import cast_by_autocast
from ampdoctor.diagnosis.scan.scaler import COLLAPSED_SCALER as COLLAPSED
from ampdoctor.diagnosis.scan.tensors import is_mask
from ampdoctor.errors import CheckpointError, LimitExceededError, UsageError
from ampdoctor.evidence.checkpoint_stats import Largest, Trend, TrendPoint
from ampdoctor.evidence.report import ErrorNote, Finding, Report, Skipped, finding_order, verdict_of, with_files
from ampdoctor.evidence.report_scan import RoleFigures, TrendFigures, TrendSection, TrendUnit
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.workflows.requests import SetAside, keep_all
from ampdoctor.workflows.scan_checkpoint import Examined
from ampdoctor.workflows.scan_log import LogBeside

_STATE = ("state:", "optimizer_state:", "scaler_state")
"""Ops of findings about a checkpoint's own values; findings from a log beside them are about earlier steps."""

Look = Callable[[Checkpoint, str], Examined]
"""Examines a member, given its name."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A member that was opened."""

    member: SavedCheckpoint
    report: Report | None = None  # with paths relative to the folder; None if it could not be read
    left: Report | None = None  # the report without what the user has set aside
    examined: Examined | None = None
    error: CheckpointError | None = None  # why it could not be read

    @property
    def sick(self) -> bool:
        """Whether its weights, buffers, moments or scaler are sick."""
        return _is_sick(self.report)

    @property
    def counts(self) -> bool:
        """Whether they are sick in a way that has not been set aside."""
        return _is_sick(self.left)

    @property
    def collapsed(self) -> bool:
        """Whether its loss scale has collapsed and this is not set aside: then it is no checkpoint to resume from."""
        return self.left is not None and any(f.code == COLLAPSED.code for f in self.left.findings)

    @property
    def well_scaled(self) -> bool:
        """Whether it holds a loss scale, and none below 1; a bare model has none."""
        scalers = self.examined.summary.scalers if self.examined is not None else ()
        return bool(scalers) and all(scaler.scale >= 1 for scaler in scalers)

    @property
    def step(self) -> int | None:
        """The step stored inside, or else the number in the name."""
        stored = self.examined.summary.global_step if self.examined is not None else None
        return stored if stored is not None else self.member.step


def _is_sick(report: Report | None) -> bool:
    return report is not None and any(
        f.severity == "error" and (f.where.op or "").startswith(_STATE) for f in report.findings
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSeries:
    """The members of a family that were read."""

    in_order: tuple[Seen, ...]  # whose place in the training is known
    beside: tuple[Seen, ...]  # of unknown time
    left_out: tuple[Skipped, ...]  # other members of unknown time, and why they do not count

    @property
    def all(self) -> tuple[Seen, ...]:
        """Every member that was read."""
        return (*self.in_order, *self.beside)


class _Reader:
    """Reads members, each at most once."""

    def __init__(self, family: Sequence[SavedCheckpoint], see: Callable[[SavedCheckpoint], Seen]) -> None:
        self.family = family
        self.seen: dict[int, Seen] = {}
        self._see = see

    def __call__(self, index: int) -> Seen:
        if index not in self.seen:
            self.seen[index] = self._see(self.family[index])
        return self.seen[index]

    def in_order(self) -> tuple[Seen, ...]:
        """Returns the members that were read, in the order of the training."""
        return tuple(self.seen[index] for index in sorted(self.seen))


def read_family(
    family: Sequence[SavedCheckpoint], look: Look, *, every_member: bool = False, set_aside: SetAside = keep_all
) -> ReadSeries:
    """Read as many members as needed to find the first sick one, and the first that `set_aside` leaves sick."""

    def see(member: SavedCheckpoint, looking: Look = look) -> Seen:
        return _see(member, looking, set_aside)

    reader = _Reader([member for member in family if member.placed], see)
    unplaced = [member for member in family if not member.placed]
    if every_member:
        in_order = tuple(reader(index) for index in range(len(reader.family)))
        return ReadSeries(in_order=in_order, beside=tuple(map(see, unplaced)), left_out=())
    _search(reader)
    return _with_undated(reader.in_order(), unplaced, look, see)


def _with_undated(
    in_order: tuple[Seen, ...],
    unplaced: Sequence[SavedCheckpoint],
    look: Look,
    see: Callable[[SavedCheckpoint, Look], Seen],
) -> ReadSeries:
    """Read members of unknown time that are checkpoints; one in a folder of its own is read whatever it holds."""
    tensors = [t for seen in in_order if seen.examined is not None for t in seen.examined.summary.tensors]
    known = {t.shape for t in tensors if t.role == "weight" and len(t.shape) > 1}
    examined: list[Seen] = []
    skipped: list[Skipped] = []

    def akin(checkpoint: Checkpoint, name: str) -> Examined:
        if known and known.isdisjoint(ref.shape for ref in checkpoint):
            raise CheckpointError("it holds no matrix of the checkpoints' shapes")
        return look(checkpoint, name)

    for member in sorted((m for m in unplaced if not m.beside), key=lambda m: not m.alias):
        seen = see(member, akin)
        if seen.error is None or member.alias:
            examined.append(seen)
        else:
            skipped.append(Skipped(what=member.name, reason=f"not read as a checkpoint: {seen.error}"))
    examined += [see(member, look) for member in unplaced if member.beside]
    return ReadSeries(in_order=in_order, beside=tuple(examined), left_out=tuple(skipped))


def _search(reader: _Reader) -> None:
    """Read enough to find the first sick member, also without what is set aside, or else to see a trend."""
    count = len(reader.family)
    last = next((i for i in reversed(range(count)) if reader(i).report is not None), None)
    if last is None:
        return
    if not reader(last).counts:
        own = [i for i in range(last + 1) if not (reader.family[i].final or reader.family[i].alias)]
        newest = own[-1] if own else last  # `last.pt` repeats it, and may be intact if it is not
        most = math.ceil(math.log2(last + 1)) + 2  # as many as a search could take, and one more
        for index in _spread(newest + 1, most - (newest < last)):
            reader(index)
    for sick in ("counts", "sick", "collapsed"):
        _find_first(reader, attrgetter(sick))


def _find_first(reader: _Reader, sick: Callable[[Seen], bool]) -> None:
    """Read until the first sick member that was read and the healthy one before it are neighbours."""
    known = [i for i, seen in reader.seen.items() if sick(seen)]
    if not known:
        return
    top = min(known)
    low = max((i for i, seen in reader.seen.items() if i < top and seen.report is not None), default=-1)

    def bad(index: int) -> bool:
        return next((sick(seen) for i in range(index, top) if (seen := reader(i)).report is not None), True)

    first = bisect_left(range(top), True, lo=low + 1, key=bad)
    for index in range(first - 1, low, -1):
        if reader(index).report is not None:
            break


def _spread(count: int, wanted: int) -> list[int]:
    wanted = min(count, wanted)
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _see(member: SavedCheckpoint, look: Look, set_aside: SetAside) -> Seen:
    try:
        with member.open() as checkpoint:
            examined = look(checkpoint, member.name)
    except CheckpointError as error:
        return Seen(member, error=error)
    except UsageError:  # about the command, not about one member
        raise
    except Exception as error:  # noqa: BLE001 - a mistake of ours over one member must not stop the others
        kind = type(error).__name__
        said = f"{member.name} was not examined: {kind} inside ampdoctor; scan it by itself to see where."
        return Seen(member, error=CheckpointError(said))
    report = placed_in_folder(examined.report, member)
    return Seen(member, report, set_aside(report), examined)


def _inside(member: SavedCheckpoint, file: str | None) -> str | None:
    return f"{member.inside}/{file}" if file and member.inside else file


def placed_in_folder(report: Report, member: SavedCheckpoint) -> Report:
    """Returns the report with paths relative to the family's folder; its tensors keep theirs."""
    path = functools.partial(_inside, member)
    return replace(
        report,
        findings=tuple(with_files(finding, path) for finding in report.findings),
        skipped=tuple(replace(s, what=path(s.what) or "") for s in report.skipped),
        errors=tuple(replace(e, what=path(e.what) or "") for e in report.errors),
    )


# -- the report on the first sick checkpoint, and the trend --

_UNIT: Mapping[str, TrendUnit] = {"step": "step", "epoch": "epoch", "number": "save"}


def scan_family(
    name: str,
    family: Sequence[SavedCheckpoint],
    look: Look,
    *,
    log: LogBeside | None = None,
    every_member: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
    set_aside: SetAside = keep_all,
) -> Report:
    """Examine as many checkpoints of a training as needed.

    The last one is read. If it is sick, the first sick one is searched by halving, else evenly spread ones are read for
    the trend: ceil(log2(n)) + 2 of n at most, and as many for what is set aside; and those of unknown time (`best.pt`).
    The findings and the verdict are those of the first sick member, or of the last; the run's `log` is judged once,
    beside it, unless it has a longer one. Raises CheckpointError where no member can be read.
    """
    read = read_family(family, look, every_member=every_member, set_aside=set_aside)
    placed = [member for member in family if member.placed]
    shown = next((seen for seen in read.all if seen.counts), None)
    shown = shown or next((seen for seen in read.all if seen.sick), None)
    shown = shown or _fullest([seen for seen in read.in_order if seen.report is not None], placed)
    shown = shown or next((seen for seen in read.beside if seen.report is not None), None)
    if shown is None or shown.report is None:
        raise next(seen.error for seen in read.all if seen.error is not None)
    points, unit = _on_one_axis(
        [_point(seen.member, seen.examined) for seen in read.in_order if seen.examined is not None], placed
    )
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
        tensors=tuple(replace(row, file=_inside(shown.member, row.file) or "") for row in report.tensors or ()),
        elsewhere=tuple(_decided(seen) for seen in read.all if seen is not shown),
    )


def _decided(seen: Seen) -> tuple[Finding, ...]:
    """Returns a member's findings, with the severity that the user has decided on."""
    if seen.report is None or seen.left is None:
        return ()
    own = {finding.fingerprint for finding in seen.report.findings}  # without outdated ignores
    return tuple(finding for finding in seen.left.found if finding.fingerprint in own)


def _fullest(healthy: Sequence[Seen], family: Sequence[SavedCheckpoint]) -> Seen | None:
    """Returns the last member, unless it is the bare model that a training leaves: then its last checkpoint."""
    last = healthy[-1] if healthy else None
    before = [s for s in healthy if s.member in family[:-1]]
    return before[-1] if last is not None and before and last.member.final else last


def _beside_log(shown: Seen, log: LogBeside | None) -> Report:
    """Returns a member's report, judged beside the run's log if that is longer than the member's own."""
    if shown.report is None or shown.examined is None:
        raise ValueError("a member that was not examined has no report")
    own = shown.examined.log
    if log is None or (own is not None and log.run.steps <= own.run.steps):
        return shown.report
    return placed_in_folder(shown.examined.with_log(log).report, shown.member)


def _point(member: SavedCheckpoint, examined: Examined) -> TrendPoint:
    summary, log = examined.summary, examined.log
    until = math.inf if summary.global_step is None else summary.global_step
    return TrendPoint(
        name=member.name,
        step=summary.global_step,
        roles=summary.roles,
        scale=summary.scalers[0].scale if summary.scalers else None,
        loss=summary.loss if log is None else log.loss_until(until),
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


def _on_one_axis(points: Sequence[TrendPoint], family: Sequence[SavedCheckpoint]) -> tuple[list[TrendPoint], TrendUnit]:
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


def _target(name: str, family: Sequence[SavedCheckpoint], read: ReadSeries, shown: Seen) -> Mapping[str, Any]:
    known = shown.report.target if shown.report is not None else {}
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
    verdict = "unreadable" if seen.report is None else seen.report.verdict
    row = {"name": seen.member.name, "step": seen.step, "verdict": verdict, "sick": seen.sick}
    return {**row, "collapsed": True} if seen.collapsed else row


def _trend(unit: TrendUnit, points: Sequence[TrendPoint], read: ReadSeries, count: int, shown: Seen) -> TrendSection:
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
    collapsed = _collapsed_since(ahead)
    if collapsed is not None:
        said += f". In {_called(ahead[collapsed])} the loss scale has collapsed"
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


def _collapsed_since(seen: Sequence[Seen]) -> int | None:
    """Returns where the loss scale collapsed for good; None if it did not, or was seen at 1 or above again."""
    since = None
    for at, one in enumerate(seen):
        if one.collapsed:
            since = at if since is None else since
        elif one.well_scaled:
            since = None
    return since


def _begun(readable: Sequence[Seen]) -> str:
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
