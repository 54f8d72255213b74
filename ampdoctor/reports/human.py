"""The human renderer: the verdict; for each finding what, where, why, change and proof; then the details.

Severity and outcome are shown as words first, and by colour second. The last line says what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from ampdoctor.evidence.report import Finding, Report
from ampdoctor.reports import human_sections, section_words
from ampdoctor.reports import text as words
from ampdoctor.reports.console import heading, labelled, listed, show, text
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.fix_code import setting_of
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.next_step import bundle_command, next_step
from ampdoctor.reports.section_words import FindingParts, figures, finding_parts
from ampdoctor.reports.text import gate_words

_SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_STATUS_STYLE = {"verified": "green", "failed": "red", "worse": "red", "intervention": "yellow", "not_run": "yellow"}
_VERDICT_STYLE = {
    "sick": "bold red",
    "healthy": "bold green",
    "not_reproduced": "bold yellow",
    "inconclusive": "bold yellow",
    "not_judged": "",
}
_IN_A_WORD = ("ok", "found", "not_run")
_IN_FULL = 3  # most findings of one code that are all shown in full, else only the first
_IN_A_LINE = 12  # further findings of that code that get a line each; one NaN in a step makes hundreds of tensors NaN


def render_human(report: Report, console: Console, *, quiet: bool = False, verbose: int = 0) -> None:
    """Print the report to `console`, whose width folds long names and never cuts them.

    `quiet` shows only findings and what could not be examined. From `verbose` 1 on, nested evidence, every alternative,
    every check, and each of many similar findings are shown in full.
    """
    if not quiet:
        _head(report, console)
    groups = groupby(report.findings, key=lambda finding: (finding.severity, finding.code, finding.cause))
    for index, (_, alike) in enumerate(groups):
        if index or not quiet:
            console.print()
        _findings(tuple(alike), console, verbose, report)
    broken = [f"{e.what} ({e.kind}): {e.message}" for e in report.errors]
    if quiet:
        for note in broken:
            console.print(text(f"not examined: {note}"))
        return
    for sentence, lines in gate_words(report, verbose=verbose):
        heading(sentence, console)
        for line in lines:
            show(text(line), console, indent=2, hang=2)
    human_sections.loss_scaling(report.scaler, console, verbose=verbose)
    human_sections.precision(report.precision, console, verbose=verbose)
    human_sections.ranges(report.profile, console, verbose=verbose)
    human_sections.health(report.health, console)
    human_sections.plan(report.plan, console, verbose=verbose)
    human_sections.trend(report, console)
    human_sections.change(report, console)
    human_sections.structure(report, console)
    _checks(report, console, verbose)
    listed("not examined", broken, console, style="bold red")
    listed("left out", (f"{s.what}: {s.reason}" for s in report.skipped), console)
    _kept(report, console)
    _next(report, console)


def _kept(report: Report, console: Console) -> None:
    """Print what a watched training has kept, and how to replay it; the command is never folded."""
    kept = report.run.get("kept") or {}
    if not kept.get("health"):
        return
    heading("kept", console)
    show(text(f"{kept['health']}: the log; ampdoctor health judges it"), console, indent=2, hang=2)
    if kept.get("bundle"):
        name = str(kept.get("model", "")).rpartition(":")[2]
        maker = f", once {name}() returns its model" if name == "make_model" else ""
        begins = " from a checkpoint of before it," if kept.get("from_checkpoint") else ""
        said = f"{kept['bundle']}: the step, to be replayed{begins} on any machine{maker}:"
        show(text(said), console, indent=2, hang=2)
        console.print(text(f"    {bundle_command(report)}"), soft_wrap=True)


def _next(report: Report, console: Console) -> None:
    """Print what to do; if a line to copy does not fit, it gets a line of its own without folding."""
    step = next_step(report)
    whole = Text("next: ", "bold") + text(str(step))
    console.print()
    if whole.cell_len <= console.width or not step.line:
        show(whole, console, hang=2)
        return
    show(Text("next: ", "bold") + text(f"{step.said}:"), console, hang=2)
    console.print(text(f"  {step.line}"), soft_wrap=True)


def _head(report: Report, console: Console) -> None:
    target = _target(report)
    show(text(f"ampdoctor {report.command}: {target}" if target else f"ampdoctor {report.command}", "bold"), console)
    show(_verdict(report), console)
    if report.trend is not None:
        show(text(report.trend.summary), console)
    if report.plan is not None:
        show(text(section_words.plan_title(report.plan)), console)
    if report.run:
        settings = [(key, v) for key, v in report.run.items() if isinstance(v, str | int | float)]
        show(text(", ".join(_setting(key, v) for key, v in settings), "dim"), console)
        for note in report.run.get("notes") or ():
            show(text(f"note: {note}", "dim"), console, hang=2)
    if report.thresholds:
        show(text(words.moved(report.thresholds), "dim"), console, hang=2)
    if report.configuration is not None:
        show(text(f"settings from {words.value(report.configuration.file)}", "dim"), console, hang=2)


def _target(report: Report) -> str:
    factory = report.target.get("factory")
    measured = "profile" in report.target  # the files are the target; the factory was measured at another time
    named = [
        words.value(v)
        for key, v in report.target.items()
        if isinstance(v, str) and key != "location" and not (measured and key == "factory")
    ]
    if measured and isinstance(factory, str):
        named[-1] += f" (measured from {words.value(factory)})"
    step = report.target.get("global_step")
    if step is not None and report.trend is None:  # for many checkpoints the trend has the step
        named.append(f"step {step}")
    return ", ".join(named)


def _verdict(report: Report) -> Text:
    line = Text("verdict: ") + Text(words.outcome(report), _VERDICT_STYLE[report.verdict]) + Text(words.counts(report))
    if not report.complete:
        line += Text("; incomplete, see 'not examined' below", "bold red")
    return line


def _setting(key: str, item: Any) -> str:
    """Return a setting in words: `threads 1`; for a switch only its name: `autocast`, `not deterministic`."""
    name = key.replace("_", " ")
    return f"{'' if item else 'not '}{name}" if isinstance(item, bool) else f"{name} {words.value(item)}"


def _findings(alike: tuple[Finding, ...], console: Console, verbose: int, report: Report) -> None:
    """Print findings of one code: a few in full; of many the first in full and the others in a line each."""
    full = len(alike) if verbose or len(alike) <= _IN_FULL else 1
    for index, finding in enumerate(alike[:full]):
        if index:
            console.print()
        _finding(finding_parts(finding, setting_of(report, finding)), console, verbose)
    rest = alike[full:]
    if not rest:
        return
    heading(f"{len(rest)} more {rest[0].code} {rest[0].name} (-v shows each in full)", console)
    for finding in rest[:_IN_A_LINE]:
        show(text(finding.message), console, indent=2, hang=2)
    if len(rest) > _IN_A_LINE:
        show(text(f"... and {len(rest) - _IN_A_LINE} more", "dim"), console, indent=2)


def _finding(parts: FindingParts, console: Console, verbose: int) -> None:
    finding, change = parts.finding, parts.change
    head = Text(overflow="fold")  # without a style, which would apply to all appended text
    head.append(finding.severity.upper(), _SEVERITY_STYLE[finding.severity])
    head.append(" ").append_text(text(f"{finding.code} {finding.name}", "bold"))
    show(head.append_text(text(f": {finding.message}")), console)
    rows = [("where", text(parts.place))]
    why = [*map(text, parts.why), *_evidence(finding.evidence, verbose)]
    rows += [("" if index else "why", said) for index, said in enumerate(why)]
    if change is not None:
        rows.append((change.label, text(change.text, "bold")))
        rows.append(("proof", text(change.proof, _STATUS_STYLE[change.status])))
    if verbose:
        rows += [("also", text(f"{other.text}: {other.proof}")) for other in parts.others]
    elif parts.others:
        rows.append(("also", text(f"{words.count(len(parts.others), 'other change')} tried (-v)", "dim")))
    if parts.help:
        rows.append(("help", text(parts.help)))
    rows.append(("more", text(f"ampdoctor rule {finding.code}", "dim")))
    labelled(rows, console)
    if change is not None:
        _paste(change.blocks, console, verbose)


def _paste(blocks: Sequence[tuple[str, str]], console: Console, verbose: int) -> None:
    """Print lines to copy without folding; a narrow terminal wraps them and still copies them whole."""
    for title, code in blocks if verbose else blocks[:1]:
        more = " (-v: in plain torch)" if len(blocks) > 1 and not verbose else ""
        show(text(f"paste {title}{more}", "dim"), console, indent=2)
        for line in code.split("\n"):
            console.print(Text(f"    {sanitise(line)}"), soft_wrap=True)


def _evidence(evidence: Mapping[str, Any], verbose: int) -> list[Text]:
    known = words.known(evidence)
    shown = [key for key, item in known.items() if verbose or not isinstance(item, Mapping | list | tuple)]
    texts = [text(f"{name} = {said}") for key in shown for name, said in figures(key, known[key])]
    hidden = len(known) - len(shown)
    if hidden:
        texts.append(text(f"({words.count(hidden, 'more figure')} with -v)", "dim"))
    return texts


def _checks(report: Report, console: Console, verbose: int) -> None:
    shown = [check for check in report.checks if verbose or check.result != "ok" or report.verdict != "sick"]
    rows = []
    for check in shown:
        margin = words.settings(check.headroom, words.value) if check.headroom else ""
        said = check.result not in _IN_A_WORD and not verbose  # a sentence with its own numbers
        rows.append((check.name, f"{check.result} ({margin})" if margin and not said else check.result))
    paths = [path for path in report.target.get("paths", ()) if isinstance(path, str)]
    for path in paths:
        head = f"{path}: "
        own = [(what.removeprefix(head), said) for what, said in rows if what.startswith(head)]
        rows = [row for row in rows if not row[0].startswith(head)]
        listed(f"checked: {path}", (f"{what}: {said}" for what, said in own), console)
    listed("checked", (f"{what}: {said}" for what, said in rows), console)


def render(report: Report, options: RenderOptions) -> str:
    """Return the human report as text."""
    return options.draw(lambda console: render_human(report, console, quiet=options.quiet, verbose=options.verbose))


# -- the human report as plain text, for a test's failure or a log --

WIDTH = 100  # columns that fit most terminals and logs


def plain_text(report: Report, *, quiet: bool = False, verbose: int = 0, width: int = WIDTH) -> str:
    """Return the human report without colour; `quiet` and `verbose` as for `RenderOptions`."""
    text = render(report, RenderOptions(width=width, color="never", quiet=quiet, verbose=verbose))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")
