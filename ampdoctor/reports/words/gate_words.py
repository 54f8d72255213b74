"""What gates have done to a report, in words: what was set aside, and what of the baseline is fixed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ampdoctor.evidence.report import FixedEntry, Report, Suppressed
from ampdoctor.reports.words import words

_IN_A_LINE = 12
"""Fixed entries that get a line each."""


def gate_words(report: Report, *, verbose: int = 0) -> list[tuple[str, list[str]]]:
    """Return a sentence, and the lines that belong below it, for each thing that there is to say.

    Args:
        report: Any.
        verbose: From 1 on every finding that was set aside, and every entry that is fixed, has its line.
    """
    said: list[tuple[str, list[str]]] = []
    if report.suppressed:
        said.append(_set_aside(report, verbose=verbose))
    if fixed(report):
        said.append((fixed_sentence(report), fixed_lines(report, verbose=verbose)))
    return said


def fixed(report: Report) -> Sequence[FixedEntry]:
    """Return the entries of the baseline that were not found again."""
    return () if report.baseline is None else report.baseline.fixed


def fixed_sentence(report: Report) -> str:
    """Return how many those are, and what to do about the baseline."""
    file = report.baseline.file if report.baseline is not None else ""
    gone = f"{words.count(len(fixed(report)), 'finding')} of the baseline {file} no longer there"
    return f"{gone}: {shlex.join(['--write-baseline', file])} writes it anew"


def fixed_lines(report: Report, *, verbose: int = 0) -> list[str]:
    """Return a line for each of them, or for the first."""
    entries = fixed(report)
    shown = entries if verbose else entries[:_IN_A_LINE]
    more = [f"... and {len(entries) - len(shown)} more"] if len(shown) < len(entries) else []
    return [*map(fixed_line, shown), *more]


def fixed_line(entry: FixedEntry) -> str:
    """Return what an entry says."""
    return f"{entry.severity} {entry.code} {place_of(entry)}: {entry.message}"


def place_of(entry: FixedEntry) -> str:
    """Return what tells an entry from others of its code: tensor or module, what is done to it, of several its file."""
    name, op, file = entry.tensor or entry.module, entry.op or "", entry.file
    if name and op and not op.startswith("state:"):  # that is the tensor itself
        name = f"{name} ({op})"
    return f"{name or op} in {file}" if file else str(name or op)


def _set_aside(report: Report, *, verbose: int) -> tuple[str, list[str]]:
    known = [one for one in report.suppressed if one.by == "baseline"]
    ignored = len(report.suppressed) - len(known)
    parts = [f"{len(known)} by the baseline {known[0].reason}"] if known else []
    parts += [f"{ignored} by an ignore"] if ignored else []
    total = words.count(len(report.suppressed), "finding")
    sentence = f"{total} set aside: {', '.join(parts)}"
    if not verbose:
        return f"{sentence}; -v lists {'it' if len(report.suppressed) == 1 else 'them'}", []
    return sentence, [_line(one) for one in report.suppressed]


def _line(one: Suppressed) -> str:
    finding = one.finding
    place = words.place(finding.where)
    return f"{finding.severity} {finding.code} {finding.name}: {finding.message} ({place}); {one.by}: {one.reason}"
