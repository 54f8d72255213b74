"""The sections of the human report: scaling, precision, ranges, runs over time, plans and scans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.report_health import HealthSection
from ampdoctor.evidence.report_plan import PlanSection
from ampdoctor.evidence.report_scaler import EmittedSettings, ScalerSection, ScalingConfidence, ScalingMargin
from ampdoctor.evidence.report_scan import ChangedCheckpoint, ListedMember, ListedOptimizer, ListedTensor, TrendFigures
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.reports import section_words
from ampdoctor.reports import text as words
from ampdoctor.reports.console import heading, labelled, layers, left_over, listed, show, table_of, text, titled
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.section_words import (
    ABOUT,
    NOT_MEASURED,
    SUMMARY_HEADINGS,
    ahead,
    measured_gradients,
    summary_rows,
)

_NEGLIGIBLE = 1e-5  # smaller differences of gradient errors are not mentioned
_FEW = 12  # groups of modules shown without -v


def loss_scaling(scaler: ScalerSection | None, console: Console, *, verbose: int) -> None:
    """Print the current and recommended settings, the limits of each, and predicted and measured results."""
    if scaler is None:
        return
    recommended = None if scaler.recommended is None else asdict(scaler.recommended)
    rows = [("now", text(words.settings(scaler.current, words.value)))]
    if scaler.change:
        rows.append(("use", text(words.settings(recommended), "bold")))
    elif scaler.predicted:
        rows.append(("use", text("no change needed: nothing tried is better by more than noise", "bold")))
    if scaler.bound_by and scaler.change:
        rows.append(("bound by", text(words.value(scaler.bound_by))))
    if scaler.change or verbose:
        rows += [
            ("", text(f"{name} {exact(bound.value)}: {bound.by}"))
            for name, bound in (scaler.bounds or {}).items()
            if verbose or not bound.by.startswith(("nothing", "kept as it is; in closed form", "the usual default"))
        ]
    if scaler.margin is not None:
        rows.append(("margin", text(_margin(scaler.margin))))
    if scaler.confidence is not None:
        rows.append(("rests on", text(_confidence(scaler.confidence, scaler.horizon))))
    heading("loss scaling", console)
    labelled(rows, console)
    _outcomes(scaler, console)
    _simulated(scaler, console)
    if scaler.emit is not None:
        show(text(f"  for {scaler.emit.framework}", "dim"), console)
        _fragment(scaler.emit, console, indent=4)


def ranges(profile: Mapping[str, Any] | None, console: Console, *, verbose: int) -> None:
    """Print the shares by format, and the layers that lose most."""
    if profile is None or not profile.get("summary"):
        return
    title = f"nonzero gradients in each format {ABOUT}"
    if measured_gradients(profile):
        titled(title, table_of(SUMMARY_HEADINGS, summary_rows(profile), left=[""]), console)
    else:
        heading(title, console)
        show(text(NOT_MEASURED), console, indent=2, hang=2)
    layers(profile, console, verbose=verbose)


def precision(advice: PrecisionAdvice | None, console: Console, *, verbose: int) -> None:
    """Print the precision for the run, and the modules that need another one."""
    if advice is None:
        return
    rows = [("use", text(f"{advice.precision} on {advice.target}: {advice.why}", "bold"))]
    if advice.alternative:
        rows.append(("or", text(f"{advice.alternative}, which is as good")))
    rows += [("do", text(remedy)) for remedy in advice.remedies]
    rows += [("note", text(note)) for note in advice.notes]
    heading("precision", console)
    labelled(rows, console)
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in advice.rows:
        if verbose or row.precision != advice.precision:
            key = (row.type, row.part, row.precision, row.reason)
            alike.setdefault((*key, row.module) if verbose else key, []).append(row.module)
    shown = list(alike.items())[: None if verbose else _FEW]
    if shown:
        heading("modules, and the precision of what they compute", console)
    for (kind, op, fmt, why, *_), modules in shown:
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        named = f"{modules[0] or 'model, loss'}{more} ({kind}): {op} in {fmt}"
        show(text(named), console, indent=2, hang=2)
        show(text(why, "dim"), console, indent=4)
    left_over(len(alike) - len(shown), "row", console)


def _outcomes(scaler: ScalerSection, console: Console) -> None:
    changed = scaler.change
    names = {"before": "replayed as it is", "observed": "replayed with the change" if changed else "replayed"}
    rows = []
    outcomes = {"predicted": scaler.predicted, "before": scaler.before, "observed": scaler.observed}
    for name, outcome in outcomes.items():
        if outcome is not None:
            shares = [outcome.skip_rate, outcome.flushed.activation_grad, outcome.flushed.weight_grad]
            rows.append([names.get(name, name), *map(words.percent, shares), words.short(outcome.relative_error)])
    if rows:
        headings = ("", "steps skipped", "dA flushed", "dW flushed", "error")
        titled(f"what it costs the gradients {ABOUT}", table_of(headings, rows), console)


def _simulated(scaler: ScalerSection, console: Console) -> None:
    rows = []
    for name in ("current", "default", "recommended"):
        expected = getattr(scaler.simulated, name, None)
        if expected is not None:
            low, middle, high = expected.skips
            skips = f"{middle:g}" if low == high else f"{middle:g} ({low:g} to {high:g})"
            ruined = "weights ruined" if expected.inf_in_weights else ""
            rows.append([name, skips, words.short(expected.relative_error), ruined])
    if rows:
        table = table_of(("settings", "steps skipped", "error", ""), rows, left=[""])
        titled(f"simulated over {scaler.horizon} steps to come", table, console)


def _margin(margin: ScalingMargin) -> str:
    gains = []
    if margin.skip_rate > 0.0:
        gains.append(f"skip {words.percent(margin.skip_rate)} fewer steps")
    if margin.relative_error > _NEGLIGIBLE:
        gains.append(f"have a gradient error lower by {words.short(margin.relative_error)}")
    text = f"simulated, the best settings found {' and '.join(gains)}" if gains else "no settings found are better"
    below = margin.headroom
    where = "at what fits" if below == 0 else f"2^{abs(below):.3g} {'below' if below > 0 else 'above'} what fits"
    return f"{text}; the scale starts {where}"


def _confidence(confidence: ScalingConfidence, horizon: int | None) -> str:
    text = f"{words.count(confidence.steps, 'recorded step')}; {ahead(confidence.exceedances, horizon)}"
    if confidence.censored:
        text += f"; {words.percent(confidence.censored)} of the steps hide their largest gradient"
    if confidence.drift:
        text += f"; gradients drift by a factor of {2.0**confidence.drift:.3g} a step, taken to go on for as long again"
    return f"{text}{'; few: record 50 or more' if confidence.low else ''}"


# -- health --


def health(section: HealthSection | None, console: Console) -> None:
    """Print each run: a summary, its scalers and checkpoints, and commands that replay the steps that were kept."""
    for run in section.runs if section is not None else ():
        heading(section_words.health_title(run), console)
        show(text(section_words.run_line(run)), console, indent=2, hang=2)
        labelled(((label, text(said)) for label, said in section_words.facts(run)), console)
        for command in section_words.commands(run):
            console.print(text(f"    {command}"), soft_wrap=True)


# -- plan --


def plan(section: PlanSection | None, console: Console, *, verbose: int) -> None:
    """Print the plans, what fits, and what they change; without -v only the gradients of a profile that change most."""
    if section is None:
        return
    rows = [[text(cell, "bold" if row[0] == "use" else "") for cell in row] for row in section_words.plan_rows(section)]
    headings = section_words.plan_headings(section)
    titled(f"plans, {section.rule}", table_of(headings, rows, left=[headings[1], headings[-1]]), console)
    heading("memory of a device", console)
    labelled([(label, text(said)) for label, said in section_words.memory_rows(section)], console)
    if section.changes:
        heading(section_words.changes_title(section), console)
        labelled([(change.what, text(change.figure)) for change in section.changes], console)
    _flushed(section, console, verbose)
    if section.emit is not None:
        heading(f"for {section.emit.framework}", console)
        _fragment(section.emit, console, indent=2)


def _fragment(emitted: EmittedSettings, console: Console, *, indent: int) -> None:
    for line in emitted.text.splitlines():
        console.print(Text(f"{' ' * indent}{sanitise(line)}"), soft_wrap=True)
    for note in emitted.notes:
        show(text(f"note: {note}", "dim"), console, indent=2, hang=2)


def _flushed(section: PlanSection, console: Console, verbose: int) -> None:
    flushed = section.flushed
    if flushed is None:
        return
    shown = None if verbose else section_words.SHOWN_LAYERS
    table = table_of(
        section_words.FLUSHED_HEADINGS,
        section_words.flushed_rows(flushed, layers=shown),
        left=section_words.FLUSHED_HEADINGS[1:2],
    )
    titled(section_words.flushed_title(flushed), table, console)
    left_over(0 if shown is None else len(flushed.layers) - shown, "gradient", console)


# -- scan: checkpoints in order, changes since an earlier one, the structure --

_VERDICT_STYLE = {"sick": "bold red", "healthy": "green", "unreadable": "bold yellow", "inconclusive": "yellow"}
_ROLE_NAMES = {
    "weight": "weights",
    "buffer": "buffers",
    "ema": "averaged copies",
    "moment": "optimizer state",
    "scaler": "scaler",
    "other": "other tensors",
}
_MOST_MOVED = 5


def trend(report: Report, console: Console) -> None:
    """Print the checkpoints that were read, one a line."""
    section = report.trend
    if section is None:
        return
    points = {point.name: point for point in section.points}
    rows = []
    for member in report.target.get("members", ()):
        point = points.get(member["name"], TrendFigures(name="", step=member["step"]))
        weights = point.roles.get("weight")
        step = point.step
        rows.append(
            (
                "-" if step is None else str(step),
                member["name"],
                text(member["verdict"], _VERDICT_STYLE.get(member["verdict"], "")),
                words.number(weights and weights.amax),
                words.percent(weights and weights.fp16_flushed),
                words.number(point.scale),
                words.number(point.loss),
            )
        )
    headings = (section.unit, "checkpoint", "verdict", "largest weight", "flushed in fp16", "loss scale", "loss")
    titled("checkpoints that were read", table_of(headings, rows, left=("checkpoint", "verdict")), console)


def change(report: Report, console: Console) -> None:
    """Print the changes of tensors by role, and the tensors that changed most."""
    section = report.change
    if section is None:
        return
    old, new = section.old, section.new
    steps = section.steps
    passed = f", {words.count(steps, 'step')}" if isinstance(steps, int) and steps > 0 else ""
    rows = [
        (
            _ROLE_NAMES[role],
            str(figures.tensors),
            words.percent(figures.unchanged),
            words.number(figures.relative_change),
            words.number(figures.old_amax),
            words.number(figures.amax),
        )
        for role, figures in section.roles.items()
    ]
    headings = ("", "tensors", "unchanged", "relative change", "largest before", "largest now")
    title = f"since {old.path} ({_at(old)} to {_at(new)}{passed})"
    titled(title, table_of(headings, rows), console)
    if old.scale is not None or new.scale is not None:
        line = f"loss scale: {words.number(old.scale)} then, {words.number(new.scale)} now"
        show(text(line), console, indent=2, hang=2)
    moved = sorted(
        (-t.relative_change, t.name)
        for t in section.tensors
        if t.role == "weight" and t.relative_change is not None and 0 < t.relative_change < math.inf
    )[:_MOST_MOVED]
    if moved:
        line = ", ".join(f"{name} {words.number(-change)}" for change, name in moved)
        show(text(f"moved most, relative to before: {line}"), console, indent=2, hang=2)


def structure(report: Report, console: Console) -> None:
    """Print everything in a checkpoint by role; names are folded, never cut."""
    section = report.structure
    if section is None:
        return
    _members(section.members, console)
    target = report.target
    if section.tensors:
        step = target.get("global_step")
        files = target.get("files", ())
        parts = [
            words.count(len(section.tensors), "tensor"),
            words.size(target.get("bytes", 0)),
            words.count(len(files), "file"),
        ]
        show(text(", ".join([*parts, f"global step {step}" if step is not None else "no step stored"])), console)
    holding = list(dict.fromkeys(tensor.file for tensor in section.tensors))
    several = len(holding) > 1
    for role, total in section.roles.items():
        rows = [
            (_name(tensor), tensor.dtype, str(list(tensor.shape)), words.size(tensor.bytes))
            + ((f"[{holding.index(tensor.file) + 1}]",) if several else ())
            for tensor in section.tensors
            if tensor.role == role
        ]
        headings = ("name", "dtype", "shape", "size", *(("file",) if several else ()))
        table = table_of(headings, rows, left=("dtype", "shape"))
        of = ", ".join(f"{count} {name}" for name, count in total.dtypes.items())
        titled(
            f"{_ROLE_NAMES[role]}: {words.count(total.tensors, 'tensor')} ({of}), {total.elements:,} elements, "
            f"{words.size(total.bytes)}",
            table,
            console,
        )
    if several:
        listed("files", [f"[{index}] {file}" for index, file in enumerate(holding, start=1)], console)
    _optimizers(section.optimizers, console)
    listed(
        "loss scalers",
        (f"{s['key'] or 'scaler'}: {words.settings(s, words.value, {'key', 'file'})}" for s in section.scalers),
        console,
    )
    log = section.log
    if log is not None:
        steps = f"steps {log.first_step} to {log.last_step}"
        listed("log", [f"{words.count(log.entries, 'line')}, {steps}"], console)
    listed("names that only an unsafe load would resolve", section.unsafe_globals, console)


def _members(members: Sequence[ListedMember], console: Console) -> None:
    if not members:
        return
    rows = []
    for member in members:
        files = ", ".join(member.files)
        at = "-" if member.step is None else f"{'epoch ' * (member.unit == 'epoch')}{member.step}"
        rows.append((at, member.name, files))
    table = table_of(("step", "checkpoint", "files"), rows, left=("checkpoint", "files"))
    titled(f"{words.count(len(members), 'checkpoint')}, in order; name one of them to list it", table, console)


def _optimizers(optimizers: Iterable[ListedOptimizer], console: Console) -> None:
    lines = []
    for optimizer in optimizers:
        states = words.count(optimizer.parameters, "parameter")
        lines.append(f"{optimizer.path or 'optimizer'}: state of {states}")
        for index, group in enumerate(optimizer.groups):
            count = group.parameters
            holds = "" if count is None else f" ({words.count(count, 'parameter')})"
            lines.append(f"  group {index}{holds}: {words.settings(group.settings, words.value)}")
    listed("optimizers", lines, console)


def _name(tensor: ListedTensor) -> str:
    name = f"{tensor.group}.{tensor.name}" if tensor.group else tensor.name
    return f"{name}: {tensor.entry}" if tensor.role == "moment" or tensor.entry == "step" else name


def _at(side: ChangedCheckpoint) -> str:
    step = side.global_step
    return "step unknown" if step is None else f"step {step}"
