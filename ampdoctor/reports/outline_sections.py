"""The sections of a report's outline: runs over time, plans, replays, precision and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.report_health import Curve, HealthRun, ScalerHistory
from ampdoctor.evidence.report_plan import FlushedByPlan, FlushedOfPlan, PlannedBatch, PlannedCluster, PlanSection
from ampdoctor.evidence.report_replay import PathSection, ProofSection, StepFigures
from ampdoctor.evidence.report_scaler import EmittedSettings, ScalerSection, ScalingConfidence, ScalingMargin
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.reports import text as words
from ampdoctor.reports.blocks import Block, Code, Heading, Line, Pairs, Text, fold, pairs, table

_FEW = 8  # most marks, rows or groups that are shown at once

# -- runs over time --

_ENDINGS = {
    "running": "still running",
    "ended": "ended",
    "cut_off": "ended without a final record (killed or crashed)",
    "unknown": "",
}


def health(report: Report) -> Iterator[Block]:
    """Yield each run: a summary, its scalers and checkpoints, and commands that replay the steps that were kept."""
    section = report.health
    if section is None or not section.runs:
        return
    yield Heading(text="over the steps", level=2, anchor="health", view="health")
    several = len(section.runs) > 1
    if several:
        yield Text(words.count(len(section.runs), "run"))
    for index, run in enumerate(section.runs):
        if several:
            yield Heading(text=health_title(run), anchor=f"run-{index}")
        yield Text(run_line(run) if several else f"{health_title(run)}: {run_line(run)}")
        yield from pairs(facts(run))
        commands = tuple(look.command for look in run.looks[-_FEW:] if look.command is not None)
        if commands:
            yield Code(title="to replay what was kept", lines=commands, language="console")


def health_title(run: HealthRun) -> str:
    """Returns a run's name, with its log and its optimizer if they add something."""
    kind = "" if run.optimizer.startswith("optimizer") else "optimizer "
    optimizer = f", {kind}{run.optimizer}" if run.optimizer else ""
    return f"run {run.name}{optimizer} ({run.source})" if run.name != run.source else f"run {run.name}{optimizer}"


def run_line(run: HealthRun) -> str:
    """Returns the run in a line: its steps, how it ended, and its loss."""
    last = f"steps {run.first_step:,} to {run.last_step:,}"
    logged = f" ({words.count(run.steps, 'step')} logged)" if run.steps != run.last_step - run.first_step + 1 else ""
    parts = [
        f"{last}{logged}",
        f"{run.precision}" if run.precision else "",
        *(_loss(curve, run.axis.first) for curve in run.curves if curve.name == "loss"),
        _ENDINGS[run.ending] + (f" with exit code {run.exit_code}" if run.exit_code else ""),
        f"{words.count(run.lost, 'line')} lost" if run.lost else "",
    ]
    return ", ".join(part for part in parts if part)


def _loss(curve: Curve, steps: Sequence[int]) -> str:
    known = [at for at, loss in enumerate(curve.middle) if loss is not None]
    after = known[-1] + 1 if known else 0
    lost = next((at for at in range(after, len(steps)) if curve.nonfinite and curve.nonfinite[at]), None)
    since = "" if lost is None else f"not finite since step {steps[lost]:,}"
    if not known:
        return f"loss {since}"
    said = f"loss {words.number(curve.middle[known[0]])} to {words.number(curve.middle[known[-1]])}"
    return f"{said}, then {since}" if since else said


def facts(run: HealthRun) -> Iterator[tuple[str, str]]:
    """Yields further facts about a run: a label and a sentence each."""
    if run.skipped:
        share = f" ({words.percent(run.skip_share)})" if run.skip_share is not None else ""
        yield "skipped", f"{words.count(run.skipped, 'step')}{share}"
    sick = sum(sum(curve.nonfinite or ()) for curve in run.curves if curve.name == "loss")
    if sick:
        yield "not finite", f"the loss of {words.count(sick, 'step')}"
    for scaler in run.scalers:
        label = f"scaler {scaler.scaler}".strip()
        yield label, scale_line(scaler)
        held = "settings not in the log" if scaler.arguments is None else words.settings(asdict(scaler.arguments))
        since = (
            "" if scaler.growth_tracker is None else f"; {words.count(scaler.growth_tracker, 'step')} since it changed"
        )
        yield "", f"{held}{since}"
    if run.checkpoints:
        yield "checkpoints", _told(f"{mark.path} (step {mark.step:,}, {mark.health})" for mark in run.checkpoints)
    for look in run.looks[-_FEW:]:
        said = look.says.removeprefix(f"step {look.step}: ").removeprefix(f"step {look.step}, ")
        yield "looked at", f"step {look.step:,}: {said or look.verdict}"
    if run.actions:
        yield (
            "done",
            _told(
                f"{mark.action} at step {mark.step:,}{f': {mark.reason}' if mark.reason else ''}"
                for mark in run.actions
            ),
        )


def scale_line(scaler: ScalerHistory) -> str:
    """Returns the history of a loss scale in a line."""
    scales = [scale for _, scale in scaler.path.points]
    if not scales:
        moved = "loss scale not in the log"
    elif len(set(scales)) == 1:
        moved = f"loss scale {words.binary(scales[0])} all along"
    else:
        moved = (
            f"loss scale {words.binary(scales[0])} at first, {words.binary(min(scales))} at least, "
            f"{words.binary(max(scales))} at most, {words.binary(scales[-1])} in the end"
        )
    return f"{moved}; {words.count(scaler.growths, 'growth')}, {words.count(scaler.backoffs, 'backoff')}"


def _told(marks: Iterable[str]) -> str:
    there = list(marks)
    before = f"{len(there) - _FEW} before, " if len(there) > _FEW else ""
    return before + ", ".join(there[-_FEW:])


# -- plans --

_FLUSHED_HEADINGS = ("nonzero gradients that fp16 makes zero", "kind", "before", "after", "with the new scale")
_MOST_CHANGES = 5
_PLAN_HEADINGS = ("", "micro-batch x accumulation x ranks", "off", "a device needs", " ")


def plan(section: PlanSection | None) -> Iterator[Block]:
    """Yield the plans, what fits, and what they change."""
    if section is None:
        return
    yield Heading(text="plan", level=2, anchor="plan")
    yield Text(plan_answer(section), "strong")
    yield from fold(f"plans, {section.rule}", *table(_PLAN_HEADINGS, plan_rows(section), _PLAN_HEADINGS[1:2]))
    yield from fold("memory of a device", *pairs(memory_rows(section)))
    if section.changes:
        rows = [(one.what, one.figure) for one in section.changes]
        used = section.use or next(iter((*section.exact, *section.nearest)), None)
        yield Heading(text=f"what it changes{'' if used is None else f': {product(used)}'} (why: docs/plan.md)")
        yield from pairs(rows[:_MOST_CHANGES])
        yield from fold(words.count(len(rows) - _MOST_CHANGES, "more change"), *pairs(rows[_MOST_CHANGES:]))
    if section.flushed is not None:
        flushed, scale = section.flushed, words.setting(section.flushed.init_scale)
        kept = f"init_scale {scale} keeps fp16's gradients as they are"
        if flushed.bound_by is not None:
            kept = f"init_scale {scale}: at a higher one {flushed.bound_by} would overflow"
        title = f"{kept}; now it is {words.setting(flushed.scale)} ({flushed.profile})"
        yield from fold(title, *table(_FLUSHED_HEADINGS, flushed_rows(flushed), _FLUSHED_HEADINGS[1:2]))
    yield from _emitted(section.emit)


def _emitted(emitted: EmittedSettings | None) -> Iterator[Block]:
    if emitted is not None:
        lines = tuple(emitted.text.splitlines())
        yield Heading(text=f"for {emitted.framework}")
        yield Code(lines=lines, language=emitted.language)
        yield from (Text(f"note: {note}", "muted") for note in emitted.notes)


def plan_answer(section: PlanSection) -> str:
    """Return the plan to use, in a line."""
    plan = section.use or section.fewer
    if plan is None:
        near = next(iter((*section.exact, *section.nearest)), None)
        return "no plan fits" if near is None else f"no exact plan fits; nearest is {product(near)}"
    devices = words.count(plan.devices, "device")
    needs = "" if plan.bytes_needed is None else f", {words.size(plan.bytes_needed)} a device"
    return f"micro-batch {plan.micro_batch}, accumulation {plan.accumulation} on {devices}: {product(plan)}{needs}"


def plan_title(section: PlanSection) -> str:
    """Return a plan's subject in a line."""
    was = "" if section.before is None else f"{cluster(section.before)} -> "
    return f"{section.global_batch} samples a step: {was}{cluster(section.after)}"


def cluster(one: PlannedCluster) -> str:
    """Return the devices, and the ranks with different samples if there are fewer."""
    sizes = {"tp": one.tensor, "pp": one.pipeline, "cp": one.context}
    parallel = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    devices = words.count(one.devices, "device")
    return f"{devices} / ({parallel}) = {one.data_parallel} data parallel" if parallel else devices


def product(plan: PlannedBatch) -> str:
    """Return a plan as its product."""
    return f"{plan.micro_batch} x {plan.accumulation} x {plan.data_parallel} = {plan.global_batch}"


def plan_rows(section: PlanSection) -> Iterator[list[str]]:
    """Yield a row for each plan below `_PLAN_HEADINGS`, the current one first."""

    def row(label: str, plan: PlannedBatch, note: str = "") -> list[str]:
        distance = f"{plan.off:+d} ({plan.off / section.global_batch:+.2%})" if plan.off else "0"
        size = "-" if plan.bytes_needed is None else words.size(plan.bytes_needed)
        unfit = "" if plan.fits else "not known to fit" if plan.fits is None else "does not fit"
        return [label, product(plan), distance, size, note or unfit]

    force = section.current
    if force is not None:
        yield row("in force", force.plan, " " if force.fits else "fits no more")
    for plan in section.exact:
        same = plan.fits and force is not None and plan.micro_batch == force.plan.micro_batch
        yield row("use" if plan is section.use else "", plan, "the micro-batch in force" if same else "")
    if section.fewer is not None:
        idle = section.after.devices - section.fewer.devices
        yield row("exact", section.fewer, f"{idle} of {words.count(section.after.devices, 'device')} idle")
    for index, plan in enumerate(section.nearest):
        yield row("" if index else "nearest", plan)


def memory_rows(section: PlanSection) -> Iterator[tuple[str, str]]:
    """Yield what fits, and why."""
    memory = section.memory
    if section.current is not None:
        yield "in force", section.current.source
    yield "fits", f"a micro-batch of up to {memory.max_micro_batch}: {memory.limited_by}"
    if memory.states_after is not None:
        was = "" if memory.states_before is None else f"{words.size(memory.states_before)} -> "
        yield "states", f"{was}{words.size(memory.states_after)} of parameters, gradients and optimizer a device"
    for note in memory.notes:
        yield "note", note


def flushed_rows(flushed: FlushedByPlan) -> Iterator[list[str]]:
    """Yield the totals, then the gradients that change most."""
    for one in (*flushed.totals, *flushed.layers):
        least = "at least " if one.lower_bound else ""
        yield [
            one.layer or "all",
            "activation" if one.kind == "activation_grad" else "weight",
            f"{least}{words.percent(one.before)}",
            f"{least}{_between(one)}",
            f"{least}{words.percent(one.kept)}",
        ]


def _between(one: FlushedOfPlan) -> str:
    least, most = words.percent(one.after), words.percent(one.after_most)
    return least if least == most else f"{least} to {most}"


# -- a replay: the path of what is not finite, and the steps with the change --


def path(section: PathSection | None) -> Iterator[Block]:
    """Yield where the values went that are not finite, and every op on the way."""
    if section is None:
        return
    yield Heading(text="from the origin to the harm", level=2, anchor="path", view="path")
    reached = sorted(section.affected, key=lambda name: name != "loss")
    said = f"step {section.step}"
    if reached:
        more = f" and {len(reached) - 3} more" if len(reached) > 3 else ""
        said += f"; it reaches {', '.join(reached[:3])}{more}"
    if section.omitted:
        said += f"; {words.count(section.omitted, 'further op')} in between not shown"
    yield Text(said)
    yield from fold("everything that it reaches", *((Text(", ".join(reached)),) if len(reached) > 3 else ()))
    rows = [
        (
            Text(node.role, node.role),
            f"{node.module or '(root)'} {node.type}".strip(),
            node.op,
            f"{node.dtype} {words.value(node.shape)}",
            words.number(node.input_amax),
            words.number(node.output_amax),
            ", ".join(f"{many} {kind}" for many, kind in ((node.nan, "NaN"), (node.inf, "Inf")) if many) or "-",
            f"{node.source.file}:{node.source.line}" if node.source is not None else "-",
        )
        for node in section.nodes
    ]
    head = ("role", "module", "op", "result", "largest in", "largest out", "not finite", "line")
    yield from fold("every op on the path", *table(head, rows, ("module", "op", "result", "not finite", "line")))


def proof(section: ProofSection | None) -> Iterator[Block]:
    """Yield the replayed steps without and with the change, and in fp32."""
    if section is None:
        return
    yield Heading(text="before and after", level=2, anchor="proof", view="proof")
    change = f"{section.kind} = {words.value(section.value)}"
    left = f"; {words.count(section.omitted, 'step')} in between not shown" if section.omitted else ""
    said = f"the same steps from the same state, without and with {change}, and in fp32{left}"
    yield Text(said, section.status, section.status.replace("_", " "))
    rows = [
        (
            str(step.step),
            name,
            words.number(run.loss),
            words.number(run.gradient_norm),
            words.number(run.scale),
            _ended(run),
        )
        for step in section.steps
        for name, run in (("without", step.without), ("with", step.with_), ("fp32", step.fp32))
        if run is not None
    ]
    head = ("step", "run", "loss", "gradient norm", "loss scale", "outcome")
    yield from fold("the replayed steps", *table(head, rows, ("run", "outcome")))


def _ended(run: StepFigures) -> Text:
    if run.finite:
        return Text("skipped", "warning") if run.skipped else Text("finite", "ok")
    return Text("not finite, skipped" if run.skipped else "not finite", "error")


# -- precision and loss scaling --


def precision(advice: PrecisionAdvice | None) -> Iterator[Block]:
    """Yield the precision for the run, and the modules that need another one."""
    if advice is None:
        return
    yield Heading(text="precision", level=2, anchor="precision")
    rows: list[tuple[str, Line]] = [("use", Text(f"{advice.precision} on {advice.target}: {advice.why}", "strong"))]
    if advice.alternative:
        rows.append(("or", f"{advice.alternative}, which is as good"))
    rows += [("then", remedy) for remedy in advice.remedies]
    rows += [("note", note) for note in advice.notes]
    yield Pairs(tuple(rows))
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for row in advice.rows:
        if row.precision != advice.precision:
            alike.setdefault((row.type, row.part, row.precision, row.reason), []).append(row.module or "model, loss")
    others: list[tuple[str, Line]] = []
    for (kind, op, fmt, why), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        others.append((f"{names[0]}{more} ({kind})", f"{op} in {fmt}: {why}"))
    if others:
        yield Heading(text="what needs another precision")
        yield from pairs(others[:_FEW])
        yield from fold(words.count(len(others) - _FEW, "more group"), *pairs(others[_FEW:]))
    every = ((row.module or "model, loss", row.type, row.part, row.precision, row.reason) for row in advice.rows)
    head = ("module", "class", "op", "precision", "why")
    yield from fold("module by module", *table(head, every, head))


def scaling(scaler: ScalerSection | None, *, kept: bool = True) -> Iterator[Block]:
    """Yield the current and recommended settings, the limits of each, and predicted and measured results.

    `kept` is False where another format than fp16 is recommended, so that the settings are no second change.
    """
    if scaler is None:
        return
    drawn = scaler.trajectory is not None and (scaler.trajectory.current or scaler.trajectory.recommended)
    yield Heading(text="loss scaling", level=2, anchor="scaling", view="scaler" if drawn else "")
    rows: list[tuple[str, Line]] = [("now", words.settings(scaler.current, words.value))]
    if scaler.change and scaler.recommended is not None:
        said = words.settings(asdict(scaler.recommended))
        rows.append(("use", Text(said, "strong")) if kept else ("if it stays in fp16", said))
    elif scaler.predicted:
        rows.append(("use", Text("no change needed: nothing tried is better by more than noise", "strong")))
    yield Pairs(tuple(rows))
    yield from fold("why these settings", *pairs(_held(scaler)))
    yield from _outcomes(scaler)
    yield from _emitted(scaler.emit)


def _held(scaler: ScalerSection) -> Iterator[tuple[str, Line]]:
    if scaler.bound_by:
        yield "bound by", words.value(scaler.bound_by)
    for name, bound in (scaler.bounds or {}).items():
        yield f"{name} {exact(bound.value)}", bound.by
    if scaler.margin is not None:
        yield "margin", _margin(scaler.margin)
    if scaler.confidence is not None:
        yield "rests on", _confidence(scaler.confidence, scaler.horizon)


def _outcomes(scaler: ScalerSection) -> Iterator[Block]:
    after = "replayed with the change" if scaler.change else "replayed"
    outcomes = {"predicted": scaler.predicted, "replayed as it is": scaler.before, after: scaler.observed}
    rows = []
    for name, outcome in outcomes.items():
        if outcome is not None:
            shares = [outcome.skip_rate, outcome.flushed.activation_grad, outcome.flushed.weight_grad]
            rows.append([name, *map(words.percent, shares), words.short(outcome.relative_error)])
    if rows:
        yield Heading(text=f"what it costs the gradients {words.ABOUT_GRADIENTS}")
        yield from table(("", "steps skipped", "dA flushed", "dW flushed", "error"), rows)
    simulated = []
    for name in ("current", "default", "recommended"):
        expected = getattr(scaler.simulated, name, None)
        if expected is not None:
            low, middle, high = expected.skips
            skips = f"{middle:g}" if low == high else f"{middle:g} ({low:g} to {high:g})"
            error = words.short(expected.relative_error)
            ruined = "weights ruined" if expected.inf_in_weights else ""
            simulated.append(
                [name, skips, words.percent(expected.skip_rate), error, words.binary(expected.final_scale), ruined]
            )
    head = ("settings", "steps skipped", "share", "error", "scale at the end", "")
    yield from fold(f"simulated over {scaler.horizon} steps to come", *table(head, simulated, [""]))


def _margin(margin: ScalingMargin) -> str:
    gains = []
    if margin.skip_rate > 0.0:
        gains.append(f"skip {words.percent(margin.skip_rate)} fewer steps")
    if margin.relative_error > 1e-5:  # smaller differences are noise
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


def ahead(exceedances: float, horizon: int | None) -> str:
    """Return how many of the steps to come may exceed every recorded one."""
    steps = "steps to come" if horizon is None else f"next {horizon:,} steps"
    if math.isnan(exceedances):
        return f"how many of the {steps} will exceed every recorded gradient is not known"
    many = f"about {exceedances:,.0f}" if exceedances >= 1.0 else "fewer than 1"
    return f"{many} of the {steps} will exceed every recorded gradient"
