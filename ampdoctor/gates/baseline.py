"""The baseline: what was found once and is known since; only what is new counts.

A finding is recognised by its fingerprint (code, module, op and tensor), never by its numbers. The ratchet has no
slack: two findings where one was known are one new finding, and so is one that is worse than it was.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import ampdoctor
from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import SEVERITIES, Finding, Report, Severity, Suppressed
from ampdoctor.gates.severities import suppressed_worst_first

FORMAT = "ampdoctor-baseline"
VERSION = "1"
"""Raised by a change after which an older ampdoctor would misread it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One finding that is known: what makes it the same finding in another run, and the severity that it had."""

    fingerprint: str
    code: str
    severity: Severity
    module: str
    op: str | None
    tensor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The findings of one run.

    Attributes:
        command: What found them ("scan", "scan --against", ...): another command looks for something else.
        entries: One for each finding, sorted.
    """

    command: str
    entries: tuple[Entry, ...]


def baseline_of(report: Report) -> Baseline:
    """Return the baseline that knows every finding of the report.

    Raises:
        UsageError: The report is incomplete or judges nothing: what was not examined would be new in the next run.
    """
    if not report.complete:
        raise UsageError("the report is incomplete, so that no baseline was written")
    if report.verdict == "not_judged":
        raise UsageError("nothing was judged, so that no baseline was written")
    return Baseline(command=_command(report), entries=_sorted(_entry(finding) for finding in report.findings))


def compare(report: Report, baseline: Baseline, file: str, *, written: bool = False) -> Report:
    """Return the report with the findings that are known set aside.

    Entries of which nothing is left are listed as fixed, and one that an ignore sets aside is still there. Of an
    incomplete report none is fixed: what was not examined may be there.

    Args:
        report: Any.
        baseline: Of the same command.
        file: Its name, for the report.
        written: It is this report's own, written just now.

    Raises:
        UsageError: The baseline is of another command.
    """
    if baseline.command != _command(report):
        raise _other_command(baseline, _command(report), file)
    known = _grouped(baseline.entries)
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        found[finding.fingerprint].append(finding)
    aside = Counter(one.finding.fingerprint for one in report.suppressed)
    accepted: set[int] = set()
    fixed: list[Entry] = []
    for fingerprint, entries in known.items():
        alike = sorted(found[fingerprint], key=lambda finding: SEVERITIES.index(finding.severity))
        left = list(entries)
        for finding in alike:
            entry = next((e for e in left if SEVERITIES.index(e.severity) <= SEVERITIES.index(finding.severity)), None)
            if entry is not None:
                left.remove(entry)
                accepted.add(id(finding))
        gone = len(entries) - len(alike) - aside[fingerprint]
        fixed += left[-gone:] if gone > 0 else []
    fresh = [finding for finding in report.findings if id(finding) not in accepted]
    old = [Suppressed(finding=f, by="baseline", reason=file) for f in report.findings if id(f) in accepted]
    section = {
        "file": file,
        "written": written,
        "new": len(fresh),
        "known": len(old),
        "fixed": [_fixed(entry) for entry in _sorted(fixed)] if report.complete else [],
    }
    suppressed = suppressed_worst_first((*report.suppressed, *old))
    return replace(report, findings=tuple(fresh), suppressed=suppressed, baseline=section)


def refuse_other_command(baseline: Baseline, command: str, file: str) -> None:
    """Say before the work begins that a baseline cannot be of this command; `compare` says the rest after it.

    Raises:
        UsageError: The baseline is of another command.
    """
    if baseline.command.partition(" ")[0] != command:
        raise _other_command(baseline, command, file)


def to_text(baseline: Baseline) -> str:
    """Return the file's text: strict JSON, sorted, the same for the same findings."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "tool": {"name": "ampdoctor", "version": ampdoctor.__version__},
        "command": baseline.command,
        "findings": [asdict(entry) for entry in baseline.entries],
    }
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=True) + "\n"


def from_text(text: str, file: str) -> Baseline:
    """Return the baseline that a file's text is.

    Args:
        text: What was read.
        file: Its name, for the sentence.

    Raises:
        UsageError: It is none, or one of a version that is not known here.
    """
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise _no_baseline(file, "it is not JSON") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        kind = "it is a report" if isinstance(read, dict) and "schema_version" in read else "it has another form"
        raise _no_baseline(file, kind)
    if read.get("version") != VERSION:
        raise UsageError(f"{file} is a baseline of a version that this ampdoctor does not know: write it anew")
    command, findings = read.get("command"), read.get("findings")
    if not isinstance(command, str) or not isinstance(findings, list):
        raise _no_baseline(file, "its command or its findings are missing")
    entries = [_read_entry(item, index, file) for index, item in enumerate(findings)]
    return Baseline(command=command, entries=_sorted(entries))


def _other_command(baseline: Baseline, command: str, file: str) -> UsageError:
    made = f"`ampdoctor {baseline.command}`"
    return UsageError(f"{file} is a baseline of {made}, which looks for other things than `ampdoctor {command}`")


def _no_baseline(file: str, why: str) -> UsageError:
    return UsageError(f"{file} is no baseline ({why}); --write-baseline {file} makes one")


def _read_entry(item: Any, index: int, file: str) -> Entry:
    names = set(Entry.__dataclass_fields__)
    whole = isinstance(item, dict) and set(item) == names
    if not whole or not all(isinstance(item[key], str) for key in ("fingerprint", "code", "module")):
        raise _no_baseline(file, f"findings[{index}] is not what --write-baseline writes")
    if item["severity"] not in SEVERITIES or not all(isinstance(item[k], str | None) for k in ("op", "tensor")):
        raise _no_baseline(file, f"findings[{index}] is not what --write-baseline writes")
    return Entry(**item)


def _command(report: Report) -> str:
    """What was run: a comparison of two checkpoints looks for other things than a scan of one."""
    return f"{report.command} --against" if report.change is not None else report.command


def _entry(finding: Finding) -> Entry:
    where = finding.where
    return Entry(
        fingerprint=finding.fingerprint,
        code=finding.code,
        severity=finding.severity,
        module=where.module,
        op=where.op,
        tensor=where.tensor,
    )


def _sorted(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    def key(entry: Entry) -> tuple[Any, ...]:
        return entry.code, entry.module, entry.tensor or "", entry.op or "", entry.fingerprint, entry.severity

    return tuple(sorted(entries, key=key))


def _grouped(entries: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    """The entries of each fingerprint, the worst first."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: SEVERITIES.index(entry.severity)):
        groups[entry.fingerprint].append(entry)
    return groups


def _fixed(entry: Entry) -> dict[str, Any]:
    rule = RULES.get(entry.code)
    return {**asdict(entry), "message": rule.title if rule is not None else ""}
