"""What gates have done to a report, in words: what was set aside, and what is left of the baseline."""

from __future__ import annotations

import shlex

from ampdoctor.evidence.report import Report, Suppressed
from ampdoctor.reports import words

_IN_A_LINE = 12
"""Fixed entries that get a line each."""


def gate_words(report: Report, *, verbose: int = 0) -> list[tuple[str, list[str]]]:
    """Return a sentence, and the lines that belong below it, for each thing that there is to say.

    Args:
        report: Any.
        verbose: From 1 on every finding that was set aside, and every entry that is fixed, has its line.
    """
    said = []
    if report.suppressed:
        said.append(_set_aside(report, verbose=verbose))
    if report.baseline is not None and report.baseline["fixed"]:
        said.append(_fixed(report, verbose=verbose))
    return said


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


def _fixed(report: Report, *, verbose: int) -> tuple[str, list[str]]:
    baseline = report.baseline or {}
    entries = baseline["fixed"]
    file = baseline["file"]
    gone = f"{words.count(len(entries), 'finding')} of the baseline {file} no longer there"
    sentence = f"{gone}: {shlex.join(['--write-baseline', file])} writes it anew"
    shown = entries if verbose else entries[:_IN_A_LINE]
    lines = [
        f"{e['severity']} {e['code']} {e['tensor'] or e['module'] or e['op'] or ''}: {e['message']}" for e in shown
    ]
    return sentence, lines + ([f"... and {len(entries) - len(shown)} more"] if len(shown) < len(entries) else [])
