"""The Markdown renderer, for GitHub's step summaries and comments: the verdict, a table, and folded findings.

GitHub drops a step's summary above 1 MiB, so the text ends at 900 kB, between two findings or rows, with a line that
says so. Up to there no name is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ampdoctor.evidence.report import Finding, Report
from ampdoctor.evidence.report_health import HealthSection
from ampdoctor.evidence.report_plan import PlanSection
from ampdoctor.evidence.report_scaler import EmittedSettings, ScalerSection
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.reports import section_words, text
from ampdoctor.reports.escape import code, fence, header, prose, row
from ampdoctor.reports.fix_code import TrainingContext, code_of, setting_of
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.next_step import next_step
from ampdoctor.reports.section_words import (
    ABOUT,
    FEW,
    GRADIENTS,
    LAYER_HEADINGS,
    NOT_MEASURED,
    SUMMARY_HEADINGS,
    half_sites,
    layer_cells,
    layer_name,
    measured_gradients,
    measured_of,
    summary_rows,
    worst_first,
)
from ampdoctor.reports.text import fixed, location_of, place_of

MAX_BYTES = 900_000
_TRUNCATED = "\n**Truncated here: the rest is more than GitHub shows; `--report json=FILE` has all of it.**\n"


def render_markdown(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as GitHub-flavoured Markdown of at most 900 kB."""
    room = MAX_BYTES - len(_TRUNCATED)
    kept: list[str] = []
    for piece in _pieces(report):
        room -= len(piece.encode())
        if room < 0:
            kept.append(_TRUNCATED)
            break
        kept.append(piece)
    return "".join(kept)


def _pieces(report: Report) -> Iterator[str]:
    """Yield parts between which the text may end; a table's head comes with its first row."""
    yield from _head(report)
    yield from _not_examined(report)
    yield from _overview(report)
    for finding in report.findings:
        yield _finding(finding, setting_of(report, finding))
    yield from _health(report.health)
    yield from _plan(report.plan)
    yield from _scaler(report.scaler)
    yield from _precision(report.precision)
    yield from _ranges(report.profile)
    yield from _set_aside(report)
    yield from _checks(report)


def _head(report: Report) -> Iterator[str]:
    yield f"## ampdoctor {report.command}: {text.of_verdict(report).partition(':')[0]}\n\n"
    about = text.target(report.target)
    yield f"{code(about)}{': ' if about else ''}{prose(text.verdict(report))}\n"
    step = next_step(report)
    yield f"\n**Next**: {prose(step.said)}{f': {code(step.line)}' if step.line else ''}\n"
    settings = [
        f"{prose(key.replace('_', ' '))} {code(text.value(item))}"
        for key, item in report.run.items()
        if isinstance(item, str | int | float)
    ]
    if settings:
        yield f"\nReplayed with {', '.join(settings)}\n"
    for note in report.run.get("notes") or ():
        yield f"\nNote: {prose(note)}\n"
    if report.thresholds:
        yield f"\n{prose(text.moved(report.thresholds))}\n"
    if report.trend is not None:
        yield f"\nTrend: {prose(report.trend.summary)}\n"


def _not_examined(report: Report) -> Iterator[str]:
    head = "\n### Not examined\n\n" + header("what", "why")
    for error in report.errors:
        yield head + row([code(error.what), f"{code(error.kind)}: {prose(error.message)}"])
        head = ""


def _overview(report: Report) -> Iterator[str]:
    head = "\n" + header("severity", "code", "at", "what")
    for finding in report.findings:
        at = location_of(finding, report.target)
        place = code(at.file if at.line is None else f"{at.file}:{at.line}")
        yield head + row([finding.severity, f"{finding.code} {finding.name}", place, prose(finding.message)])
        head = ""


def _finding(finding: Finding, setting: TrainingContext) -> str:
    lines = [f"**where**: {prose(text.place(finding.where))}"]
    lines += [f"**why**: {prose(said)}" for said in text.why(finding)]
    lines += [
        f"**evidence**: {code(key)} = {code(text.record(item) if isinstance(item, Mapping) else text.value(item))}"
        for key, item in text.known(finding.evidence).items()
    ]
    pasted = ""
    if finding.prescription is not None:
        lines.append(f"**change**: {prose(text.change(finding.prescription))}")
        lines.append(f"**proof**: {prose(text.proof(finding.prescription))}")
        lines += [
            f"**also tried**: {prose(text.change(other))}: {prose(text.proof(other))}"
            for other in finding.prescription.alternatives
        ]
        paste = code_of(finding.prescription, setting, finding.cause)
        pasted = "".join(f"\n{fence(block, 'python')}\n" for block in (paste.apply, paste.torch) if block)
    if finding.help:
        lines.append(f"**help**: {prose(finding.help)}")
    lines.append(f"**more**: `ampdoctor rule {finding.code}`, fingerprint `{finding.fingerprint}`")
    summary = f"{finding.severity} {finding.code} {finding.name}: {prose(finding.message, html=True)}"
    listed = "".join(f"- {line}\n" for line in lines)
    return f"\n<details><summary>{summary}</summary>\n\n{listed}{pasted}\n</details>\n"


def _health(section: HealthSection | None) -> Iterator[str]:
    for run in section.runs if section is not None else ():
        yield f"\n### {prose(section_words.health_title(run))}\n\n{prose(section_words.run_line(run))}\n\n"
        for label, said in section_words.facts(run):
            yield f"- {f'**{prose(label)}**: ' if label else ''}{prose(said)}\n"
        for command in section_words.commands(run):
            yield f"\n{fence([command], 'console')}\n"


def _plan(section: PlanSection | None) -> Iterator[str]:
    if section is None:
        return
    yield f"\n### {prose(section_words.plan_title(section))}\n\nPlans, {prose(section.rule)}:\n\n"
    yield _table(section_words.plan_headings(section), section_words.plan_rows(section))
    for label, said in section_words.memory_rows(section):
        yield f"\n- **{label}**: {prose(said)}"
    if section.changes:
        rows = (row([prose(one.what), code(one.figure)]) for one in section.changes)
        title = prose(section_words.changes_title(section).capitalize())
        yield f"\n\n### {title}\n\n{header('what', 'by')}{''.join(rows)}"
    if section.flushed is not None:
        shown = section_words.flushed_rows(section.flushed, layers=section_words.SHOWN_LAYERS)
        yield f"\n### {prose(section_words.flushed_title(section.flushed))}\n\n"
        yield _table(section_words.FLUSHED_HEADINGS, shown)
    if section.emit is not None:
        yield from _emitted(section.emit)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return header(*headings) + "".join(row(map(prose, cells)) for cells in rows)


def _emitted(emitted: EmittedSettings) -> Iterator[str]:
    yield f"\nFor {code(emitted.framework)}:\n\n{fence(emitted.text.splitlines(), emitted.language)}\n"
    for note in emitted.notes:
        yield f"\nNote: {prose(note)}\n"


def _scaler(scaler: ScalerSection | None) -> Iterator[str]:
    if scaler is None:
        return
    yield "\n### Loss scaling\n\n"
    current = scaler.current or {}
    recommended = asdict(scaler.recommended) if scaler.recommended is not None else {}
    head = header("setting", "now", "recommended", "held by")
    bounds = scaler.bounds or {}
    for name in dict.fromkeys([*current, *recommended]):
        by = bounds[name].by if name in bounds else ""
        yield head + row([code(name), _shown(current.get(name)), _setting(recommended.get(name)), prose(by)])
        head = ""
    if scaler.change and scaler.bound_by:
        yield f"\nBound by: {prose(text.value(scaler.bound_by))}\n"
    if scaler.predicted and not scaler.change:  # without a prediction the settings were not judged
        yield "\nNo change needed: nothing tried is better by more than noise.\n"
    head = "\n" + header(
        "outcome", "steps skipped", "activation gradients flushed", "weight gradients flushed", "error"
    )
    for name, outcome in {"predicted": scaler.predicted, "before": scaler.before, "observed": scaler.observed}.items():
        if outcome is not None:
            shares = [outcome.skip_rate, outcome.flushed.activation_grad, outcome.flushed.weight_grad]
            percents = (prose(text.percent(share)) for share in shares)
            yield head + row([name, *percents, _shown(outcome.relative_error)])
            head = ""
    if scaler.emit is not None:
        yield from _emitted(scaler.emit)


def _precision(advice: PrecisionAdvice | None) -> Iterator[str]:
    if advice is None:
        return
    yield f"\n### Precision\n\nUse {code(advice.precision)} on {code(advice.target)}: {prose(advice.why)}\n"
    if advice.alternative:
        yield f"\nAs good: {code(advice.alternative)}\n"
    for remedy in advice.remedies:
        yield f"\nDo: {prose(remedy)}\n"
    for note in advice.notes:
        yield f"\nNote: {prose(note)}\n"
    head = "\n" + header("module", "class", "op", "precision", "why")
    for one in advice.rows:
        if one.precision != advice.precision:
            names = [code(one.type), code(one.part), code(one.precision)]
            yield head + row([code(one.module) or "model, loss", *names, prose(one.reason)])
            head = ""


def _ranges(profile: Mapping[str, Any] | None) -> Iterator[str]:
    if profile is None or not profile.get("summary"):
        return
    title = f"\n### Ranges\n\nNonzero gradients in each format {prose(ABOUT)}"
    if measured_gradients(profile):
        yield f"{title}:\n\n{header(*SUMMARY_HEADINGS)}"
        for cells in summary_rows(profile):
            yield row(map(prose, cells))
    else:
        yield f"{title}: {NOT_MEASURED}\n"
    measured = measured_of(profile)
    sites = [site for site in half_sites(profile) if site["kind"] in GRADIENTS]
    head = "\nLayers, those that lose most first, and what of them flushes:\n\n" + header("layer", *LAYER_HEADINGS)
    for site in worst_first(sites, measured)[:FEW]:
        yield head + row([code(layer_name(site)), *map(prose, layer_cells(site, measured))])
        head = ""
    if len(sites) > FEW:
        yield f"\n... and {text.count(len(sites) - FEW, 'more layer')}\n"


def _set_aside(report: Report) -> Iterator[str]:
    head = "\n### Suppressed\n\n" + header("severity", "code", "by", "what")
    for one in report.suppressed:
        finding, by = one.finding, f"{one.by}: {prose(one.reason)}"
        yield head + row([finding.severity, f"{finding.code} {finding.name}", by, prose(finding.message)])
        head = ""
    head = "\n### Fixed since the baseline\n\n" + header("severity", "code", "where", "what")
    for gone in fixed(report):
        yield head + row([gone.severity, code(gone.code), code(place_of(gone)), prose(gone.message)])
        head = ""


def _checks(report: Report) -> Iterator[str]:
    """Yield checks and skipped parts, each as one part: a cut inside would break the folding."""
    tables = {
        "checked": [
            row([prose(one.name), prose(one.result), code(text.record(one.headroom))]) for one in report.checks
        ],
        "left out": [row([code(one.what), "", prose(one.reason)]) for one in report.skipped],
    }
    for title, rows in tables.items():
        if rows:
            summary = f"{len(rows)} {title}"
            table = header("what", "result", "figures" if title == "checked" else "why") + "".join(rows)
            yield f"\n<details><summary>{summary}</summary>\n\n{table}\n</details>\n"


def _setting(item: Any) -> str:
    return "" if item is None else code(text.setting(item))


def _shown(item: Any) -> str:
    return "" if item is None else code(text.value(item))
