"""The human renderer: for each finding what, where, why, what to change, and the proof.

Everything that is shown goes through `sanitise` into a `Text`, never through Rich's markup: names come from files that
others wrote. Severity and outcome are words first and colours second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampdoctor.evidence.report import Finding, Prescription, Report
from ampdoctor.reports import range_sections, scan_sections, words
from ampdoctor.reports.gate_words import gate_words
from ampdoctor.reports.paste import Setting, code_of, setting_of
from ampdoctor.reports.sanitise import sanitise

_SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_STATUS_STYLE = {"verified": "green", "failed": "red", "worse": "red", "intervention": "yellow", "not_run": "yellow"}
_VERDICT = {
    "sick": ("sick", "bold red"),
    "healthy": ("healthy", "bold green"),
    "not_reproduced": ("not reproduced: the failure did not come back in the steps that were replayed", "bold yellow"),
    "inconclusive": ("inconclusive: what was examined does not settle it", "bold yellow"),
    "not_judged": ("not judged: the content is listed, not examined", ""),
}
_IN_A_WORD = ("ok", "found", "not_run")
_IN_FULL = 3
"""Findings of one code that are all shown in full; of more, the first is."""
_IN_A_LINE = 12
"""Further findings of that code that get a line each; one NaN in a step makes hundreds of tensors NaN."""


def render_human(report: Report, console: Console, *, quiet: bool = False, verbose: int = 0) -> None:
    """Print the report to `console`.

    Args:
        report: What to show.
        console: Where; its width folds long names and never cuts them.
        quiet: Show the findings only.
        verbose: From 1 on also nested evidence, every alternative that was tried, every check, and each of many alike
            findings in full.
    """
    if not quiet:
        _head(report, console)
    for _, alike in groupby(report.findings, key=lambda finding: (finding.severity, finding.code, finding.cause)):
        _findings(tuple(alike), console, verbose, setting_of(report.run))
    if quiet:
        return
    range_sections.loss_scaling(report.scaler, console, verbose=verbose)
    range_sections.precision(report.precision, console, verbose=verbose)
    range_sections.ranges(report.profile, console, verbose=verbose)
    scan_sections.trend(report, console)
    scan_sections.change(report, console)
    scan_sections.structure(report, console)
    _gates(report, console, verbose)
    _checks(report, console, verbose)
    _list("not examined", ((f"{e.what} ({e.kind})", e.message) for e in report.errors), console, style="bold red")
    _list("left out", ((s.what, s.reason) for s in report.skipped), console, style="bold")


def _text(text: str, style: str = "") -> Text:
    return Text(sanitise(text), style=style, overflow="fold")


def _rows(rows: Iterable[tuple[str, Text]], console: Console, indent: int = 2) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold", ratio=1)
    for label, text in rows:
        table.add_row(Text(label), text)
    if table.row_count:
        console.print(Padding(table, (0, 0, 0, indent)))


def _head(report: Report, console: Console) -> None:
    factory = report.target.get("factory")
    measured = "profile" in report.target  # by that factory, at another time: it is no target beside the files
    named = [
        words.value(v) for key, v in report.target.items() if isinstance(v, str) and not (measured and key == "factory")
    ]
    if measured and isinstance(factory, str):
        named[-1] += f" (measured from {words.value(factory)})"
    step = report.target.get("global_step")
    if step is not None and report.trend is None:  # of many checkpoints the trend says which one it is about
        named.append(f"step {step}")
    target = ", ".join(named)
    console.print(_text(f"ampdoctor {report.command}: {target}" if target else f"ampdoctor {report.command}", "bold"))
    if report.run:
        settings = [(key, v) for key, v in report.run.items() if isinstance(v, str | int | float)]
        console.print(_text(", ".join(f"{key} {words.value(v)}" for key, v in settings), "dim"))
        for note in report.run.get("notes") or ():
            console.print(_text(f"note: {note}", "dim"))
    sentence, style = _VERDICT[report.verdict]
    steps = report.run.get("steps")
    if report.verdict == "healthy" and isinstance(steps, int):
        sentence += f" in {words.count(steps, 'replayed step')}"
    by_severity = [
        words.count(number, severity)
        for severity in ("error", "warning", "note")
        if (number := sum(f.severity == severity for f in report.findings))
    ]
    line = Text("verdict: ") + Text(sentence, style)
    if by_severity:
        line += Text(f" ({', '.join(by_severity)})")
    if not report.complete:
        line += Text("; incomplete, see 'not examined' below", "bold red")
    console.print(line)
    if report.trend is not None:
        console.print(_text(report.trend["summary"]))


def _findings(alike: tuple[Finding, ...], console: Console, verbose: int, setting: Setting) -> None:
    """Show findings of one code: all in full where they are few, else the first in full and the others in a line."""
    full = len(alike) if verbose or len(alike) <= _IN_FULL else 1
    for finding in alike[:full]:
        _finding(finding, console, verbose, setting)
    rest = alike[full:]
    if not rest:
        return
    console.print()
    console.print(_text(f"{len(rest)} more {rest[0].code} {rest[0].name} (-v shows each in full)", "bold"))
    for finding in rest[:_IN_A_LINE]:
        console.print(Padding(_text(finding.message), (0, 0, 0, 2)))
    if len(rest) > _IN_A_LINE:
        console.print(Padding(_text(f"... and {len(rest) - _IN_A_LINE} more", "dim"), (0, 0, 0, 2)))


def _finding(finding: Finding, console: Console, verbose: int, setting: Setting) -> None:
    console.print()
    head = Text(overflow="fold")  # without a style of its own, which would spread over all that is appended
    head.append(finding.severity.upper(), _SEVERITY_STYLE[finding.severity])
    head.append(" ").append_text(_text(f"{finding.code} {finding.name}", "bold"))
    console.print(head.append_text(_text(f": {finding.message}")))
    rows = [("where", _text(words.place(finding.where)))]
    if finding.cause:
        rows.append(("why", _text(finding.cause.replace("_", " "))))
    rows += _evidence(finding.evidence, verbose, labelled=finding.cause is not None)
    if finding.prescription is not None:
        rows += _prescription(finding.prescription, verbose)
    if finding.help and not _says(finding.prescription, finding.help):
        rows.append(("help", _text(finding.help)))
    rows.append(("more", _text(f"ampdoctor rule {finding.code}", "dim")))
    _rows(rows, console)
    if finding.prescription is not None:
        _paste(finding.prescription, finding.cause, setting, console, verbose)


def _paste(prescription: Prescription, cause: str | None, setting: Setting, console: Console, verbose: int) -> None:
    """Print lines to copy: never folded, which would break them; a narrow terminal wraps them and copies them whole."""
    code = code_of(prescription, setting, cause)
    blocks = [("with ampdoctor", code.apply), ("in plain torch", code.torch)]
    blocks = [(title, lines) for title, lines in blocks if lines]
    for title, lines in blocks if verbose else blocks[:1]:
        more = " (-v: in plain torch)" if len(blocks) > 1 and not verbose else ""
        console.print(_text(f"  paste {title}{more}", "dim"))
        for line in lines:
            console.print(Text(f"    {sanitise(line)}"), soft_wrap=True)


def _evidence(evidence: Mapping[str, Any], verbose: int, *, labelled: bool) -> list[tuple[str, Text]]:
    known = {key: item for key, item in evidence.items() if item is not None}
    shown = [key for key, item in known.items() if verbose or not isinstance(item, Mapping | list | tuple)]
    texts = [_text(line) for key in shown for line in _figures(key, known[key])]
    hidden = len(known) - len(shown)
    if hidden:
        texts.append(_text(f"({words.count(hidden, 'more figure')} with -v)", "dim"))
    return [("" if labelled or index else "why", text) for index, text in enumerate(texts)]


def _figures(key: str, item: Any) -> Iterable[str]:
    """Return a line for a figure, or one for each record of a list of them."""
    if isinstance(item, list | tuple) and item and all(isinstance(part, Mapping) for part in item):
        return [f"{key}[{index}] = {words.record(part)}" for index, part in enumerate(item)]
    return [f"{key} = {words.record(item) if isinstance(item, Mapping) else words.value(item)}"]


def _prescription(prescription: Prescription, verbose: int) -> list[tuple[str, Text]]:
    style = _STATUS_STYLE[prescription.status]
    rows = [
        (_label(prescription), _text(words.change(prescription), "bold")),
        ("proof", _text(words.proof(prescription), style)),
    ]
    if verbose:
        rows += [("also", _text(f"{words.change(a)}: {words.proof(a)}")) for a in prescription.alternatives]
    elif prescription.alternatives:
        rows.append(("also", _text(f"{words.count(len(prescription.alternatives), 'other change')} tried (-v)", "dim")))
    return rows


def _label(prescription: Prescription) -> str:
    """Code that no replay can change, or that was changed in vain, is advice to whoever writes it."""
    unproved = prescription.kind == "code" and prescription.status in ("failed", "not_run")
    return "advice" if unproved else "change"


def _says(prescription: Prescription | None, sentence: str) -> bool:
    """Is it what the row above says already?"""
    return prescription is not None and sentence in (prescription.detail, words.change(prescription))


def _settings(settings: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key}={words.value(v)}" for key, v in settings.items()) if settings else "none"


def _gates(report: Report, console: Console, verbose: int) -> None:
    for sentence, lines in gate_words(report, verbose=verbose):
        console.print()
        console.print(_text(sentence, "bold"))
        for line in lines:
            console.print(Padding(_text(line), (0, 0, 0, 2)))


def _checks(report: Report, console: Console, verbose: int) -> None:
    shown = [check for check in report.checks if verbose or check.result != "ok" or report.verdict != "sick"]
    rows = []
    for check in shown:
        margin = _settings(check.headroom) if check.headroom else ""
        said = check.result not in _IN_A_WORD and not verbose  # a sentence, with its numbers in it
        rows.append((check.name, f"{check.result} ({margin})" if margin and not said else check.result))
    _list("checked", rows, console, style="bold")


def _list(title: str, rows: Iterable[tuple[str, str]], console: Console, *, style: str) -> None:
    lines = [_text(f"{what}: {said}") for what, said in rows]
    if not lines:
        return
    console.print()
    console.print(Text(title, style))
    for line in lines:
        console.print(Padding(line, (0, 0, 0, 2)))
