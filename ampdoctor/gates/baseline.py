"""The baseline: findings that are already known; only new findings count.

A finding is recognised by its fingerprint (code, module, op and tensor), and by its file if several paths were named,
but never by its numbers. A single path, even a folder of many checkpoints, is one training: its baseline holds from one
save to the next. Within a checkpoint every increase is new: a second finding where one was known, a worse one, or one
about one more tensor.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.errors import UsageError
from ampdoctor.evidence.json_records import RecordReader
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import (
    SEVERITIES,
    BaselineSection,
    Finding,
    FixedEntry,
    Report,
    Severity,
    Suppressed,
    fingerprint_at,
)
from ampdoctor.gates.findings import checkpoint_file, examined, suppressed_worst_first, worst_first
from ampdoctor.package import version

FORMAT = "ampdoctor-baseline"
_READER = RecordReader({})
VERSION = "1"  # increases with a change that an older ampdoctor would misread


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One address of a known finding, with fields as in `Finding` and `Where`."""

    fingerprint: str
    code: str
    severity: Severity
    module: str
    op: str | None
    tensor: str | None
    file: str | None  # if several paths were named; None: a checkpoint of any name


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The known findings of one run."""

    command: str  # it found them ("scan", "scan --against", ...): others search other things
    entries: tuple[Entry, ...]  # one for each address of a finding, sorted


def baseline_of(report: Report) -> Baseline:
    """Return a baseline of all the report's findings, including those that a baseline has suppressed.

    Raises UsageError for an incomplete or unjudged report: parts that were not examined would be new in the next run.
    """
    if not report.complete:
        raise UsageError("the report is incomplete, so that no baseline was written")
    if report.verdict == "not_judged":
        raise UsageError("nothing was judged, so that no baseline was written")
    known = (one.finding for one in report.suppressed if one.by == "baseline")
    groups = [(*report.findings, *known), *report.elsewhere]
    return Baseline(command=_command(report), entries=_sorted(_enough_for_each(groups, report.target)))


def _enough_for_each(groups: Iterable[Iterable[Finding]], target: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield as many entries of an address as the checkpoint with most of them has, the worst severities."""
    enough: dict[tuple[str, str | None], list[Entry]] = {}
    for group in groups:
        own: dict[tuple[str, str | None], list[Entry]] = defaultdict(list)
        for finding in group:
            for entry in _entries(finding, target):
                own[entry.fingerprint, entry.file].append(entry)
        for key, entries in own.items():
            pairs = zip_longest(enough.get(key, ()), sorted(entries, key=_severity))
            enough[key] = [min((e for e in pair if e is not None), key=_severity) for pair in pairs]
    return (entry for entries in enough.values() for entry in entries)


def _severity(entry: Entry) -> int:
    return SEVERITIES.index(entry.severity)


def apply_baseline(report: Report, baseline: Baseline, file: str, *, written: bool = False) -> Report:
    """Return the report with the known findings suppressed; `file` is the baseline's name.

    Entries without a finding are listed as fixed; a finding that an ignore suppresses still exists. An entry is not
    fixed if it was not examined: in an incomplete or unjudged report, or in another file. `written` means that the
    baseline was just written from this report. Raises UsageError for a baseline of another command.
    """
    if baseline.command != _command(report):
        raise _other_command(baseline, _command(report), file)
    known = _Known(baseline.entries, report.target)
    worst = worst_first(report.findings)
    accepted = {id(finding) for finding in worst if known.accept(finding)}
    left = [finding for finding in worst if id(finding) not in accepted]
    for finding in (*left, *(one.finding for one in report.suppressed), *itertools.chain(*report.elsewhere)):
        known.mark_seen(finding)
    fresh = tuple(finding for finding in report.findings if id(finding) not in accepted)
    old = [Suppressed(finding=f, by="baseline", reason=file) for f in report.findings if id(f) in accepted]
    judged = report.complete and report.verdict != "not_judged" and _all_were_read(report)
    section = BaselineSection(
        file=file,
        written=written,
        new=len(fresh),
        known=len(old),
        fixed=tuple(_fixed(entry) for entry in known.left() if judged and _was_examined(entry, report)),
    )
    suppressed = suppressed_worst_first((*report.suppressed, *old))
    return replace(report, findings=fresh, suppressed=suppressed, baseline=section)


class _Known:
    """The entries that no finding has used up yet."""

    def __init__(self, entries: Iterable[Entry], target: Mapping[str, Any]) -> None:
        self._target = target
        self._left: dict[str, list[Entry]] = defaultdict(list)
        for entry in sorted(entries, key=_severity):  # the worst first
            self._left[entry.fingerprint].append(entry)

    def accept(self, finding: Finding) -> bool:
        """Use up an entry at least as severe for each of a finding's addresses; none if one address has none."""
        taken: list[Entry] = []
        for where in finding.places:
            entry = self._take(finding.code, where, finding.severity)
            if entry is None:
                for one in taken:
                    self._left[one.fingerprint] = sorted([one, *self._left[one.fingerprint]], key=_severity)
                return False
            taken.append(entry)
        return True

    def mark_seen(self, finding: Finding) -> None:
        """Use up the entry of each of a finding's addresses, whatever its severity: the finding still exists."""
        for where in finding.places:
            self._take(finding.code, where, "note")

    def left(self) -> tuple[Entry, ...]:
        return _sorted(entry for entries in self._left.values() for entry in entries)

    def _take(self, code: str, where: Where, severity: Severity) -> Entry | None:
        entries, file = self._left[fingerprint_at(code, where)], checkpoint_file(where, self._target)
        for index, entry in enumerate(entries):
            if entry.file in (None, file) and SEVERITIES.index(entry.severity) <= SEVERITIES.index(severity):
                return entries.pop(index)
        return None


def _all_were_read(report: Report) -> bool:
    """Whether each checkpoint of a folder of many was read: else a finding may be missing only because it was not."""
    return report.target.get("count") is None or len(report.target.get("members", ())) >= report.target["count"]


def _was_examined(entry: Entry, report: Report) -> bool:
    return entry.file is None or any(
        entry.file == name or entry.file.startswith(f"{name}/") for name in examined(report)
    )


def refuse_other_command(baseline: Baseline, command: str, file: str) -> None:
    """Raise UsageError for a baseline of another command, before the work begins; `apply_baseline` checks the rest."""
    if baseline.command.partition(" ")[0] != command:
        raise _other_command(baseline, command, file)


def to_text(baseline: Baseline) -> str:
    """Return the file's text: strict JSON, sorted, the same for the same findings."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "tool": {"name": "ampdoctor", "version": version()},
        "command": baseline.command,
        "findings": [asdict(entry) for entry in baseline.entries],
    }
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=True) + "\n"


def from_text(text: str, file: str) -> Baseline:
    """Return the baseline in a file's text; raises UsageError for any other text, or an unknown version."""
    try:
        read = json.loads(text)
        whole = (read["format"], read["version"]) == (FORMAT, VERSION)
        command, entries = read["command"], [_READER.read(Entry, item) for item in read["findings"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        whole, command, entries = False, "", []
    if not whole or not isinstance(command, str):
        cure = shlex.join(["--write-baseline", file])
        raise UsageError(f"{file} is no baseline that this version of ampdoctor has written; {cure} makes one")
    return Baseline(command=command, entries=_sorted(entries))


def _other_command(baseline: Baseline, command: str, file: str) -> UsageError:
    made = f"`ampdoctor {baseline.command}`"
    return UsageError(f"{file} is a baseline of {made}, which looks for other things than `ampdoctor {command}`")


def _command(report: Report) -> str:
    return f"{report.command} --against" if report.change is not None else report.command


def _entries(finding: Finding, target: Mapping[str, Any]) -> Iterator[Entry]:
    several = len(target.get("paths") or ()) > 1
    for where in finding.places:
        yield Entry(
            fingerprint=fingerprint_at(finding.code, where),
            code=finding.code,
            severity=finding.severity,
            module=where.module,
            op=where.op,
            tensor=where.tensor,
            file=checkpoint_file(where, target) if several else None,
        )


def _sorted(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    def key(entry: Entry) -> tuple[Any, ...]:
        place = (entry.file or "", entry.module, entry.tensor or "", entry.op or "")
        return entry.code, *place, entry.fingerprint, entry.severity

    return tuple(sorted(entries, key=key))


def _fixed(entry: Entry) -> FixedEntry:
    rule = rules().get(entry.code)
    return FixedEntry(**asdict(entry), message=rule.title if rule is not None else "")
