"""Findings, runs, plans and profiles in words, shared by the reports for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.report_health import HealthRun, ScalerHistory
from ampdoctor.evidence.report_plan import (
    FlushedByPlan,
    FlushedOfPlan,
    PlannedBatch,
    PlannedCluster,
    PlanSection,
)
from ampdoctor.evidence.report_scaler import ScalerArguments
from ampdoctor.reports import text as words
from ampdoctor.reports.fix_code import TrainingContext, code_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A prescription in words."""

    label: str  # `change`, or `advice` if only the author of the code can follow it
    text: str  # what to change
    status: str  # the result of its replay, in a word
    proof: str  # the same in a sentence
    blocks: tuple[tuple[str, str], ...]  # lines to paste, with their titles


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingParts:
    """A finding in words; the texts must be sanitised before they are shown."""

    finding: Finding
    place: str  # its address in a line
    why: tuple[str, ...]  # its cause and what moved first, one line each
    figures: tuple[tuple[str, str], ...]  # name and value of each number of its evidence
    change: Change | None
    others: tuple[Change, ...]  # other changes that were tried
    help: str  # what to do, unless the change says it


def finding_parts(finding: Finding, setting: TrainingContext) -> FindingParts:
    """Split a finding; the lines to paste are for `setting`."""
    prescription = finding.prescription
    change = None if prescription is None else _change(prescription, setting, finding.cause)
    others = () if prescription is None else prescription.alternatives
    said = {change.text, prescription.detail} if change and prescription else set()
    return FindingParts(
        finding=finding,
        place=words.place(finding.where),
        why=words.why(finding),
        figures=tuple(figure for key, item in words.known(finding.evidence).items() for figure in figures(key, item)),
        change=change,
        others=tuple(_change(other, setting, finding.cause) for other in others),
        help="" if finding.help in said else finding.help,
    )


def _change(prescription: Prescription, setting: TrainingContext, cause: str | None) -> Change:
    code = code_of(prescription, setting, cause)
    unproved = prescription.kind == "code" and prescription.status in ("failed", "not_run")
    blocks = (("with ampdoctor", code.apply), ("in plain torch", code.torch))
    return Change(
        label="advice" if unproved else "change",
        text=words.change(prescription),
        status=prescription.status,
        proof=words.proof(prescription),
        blocks=tuple((title, "\n".join(lines)) for title, lines in blocks if lines),
    )


def figures(key: str, item: Any) -> list[tuple[str, str]]:
    """Return name and value of a number of the evidence; of a list of records, those of each."""
    if isinstance(item, list | tuple) and item and all(isinstance(part, Mapping) for part in item):
        return [(f"{key}[{index}]", words.record(part)) for index, part in enumerate(item)]
    return [(key, words.record(item) if isinstance(item, Mapping) else words.value(item))]


# -- runs over time --

_ENDINGS = {
    "running": "still running",
    "ended": "ended",
    "cut_off": "cut off: the log has no last line and no longer grows",
    "unknown": "",
}
_FEW = 8  # most marks of one kind that are shown: the last ones


def health_title(run: HealthRun) -> str:
    """Returns a run's name, with its log and its optimizer if they add something."""
    kind = "" if run.optimizer.startswith("optimizer") else "optimizer "
    optimizer = f", {kind}{run.optimizer}" if run.optimizer else ""
    return f"run {run.name}{optimizer} ({run.source})" if run.name != run.source else f"run {run.name}{optimizer}"


def run_line(run: HealthRun) -> str:
    """Returns the run in a line: its steps, how it ended, and its loss."""
    last = f"steps {run.first_step:,} to {run.last_step:,}"
    logged = f" ({words.count(run.steps, 'step')} logged)" if run.steps != run.last_step - run.first_step + 1 else ""
    losses = [loss for curve in run.curves if curve.name == "loss" for loss in curve.middle if loss is not None]
    parts = [
        f"{last}{logged}",
        f"{run.precision}" if run.precision else "",
        f"loss {words.number(losses[0])} to {words.number(losses[-1])}" if losses else "",
        _ENDINGS[run.ending] + (f" with exit code {run.exit_code}" if run.exit_code else ""),
        f"{words.count(run.lost, 'line')} lost" if run.lost else "",
    ]
    return ", ".join(part for part in parts if part)


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
        yield "", settings_line(scaler)
    if run.checkpoints:
        yield "checkpoints", _told(f"{mark.path} (step {mark.step:,}, {mark.health})" for mark in run.checkpoints)
    for look in run.looks[-_FEW:]:
        yield "looked at", f"step {look.step:,}: {look.says or look.verdict}"
    if run.actions:
        yield (
            "done",
            _told(
                f"{mark.action} at step {mark.step:,}{f': {mark.reason}' if mark.reason else ''}"
                for mark in run.actions
            ),
        )


def commands(run: HealthRun) -> Sequence[str]:
    """Returns commands that replay the steps that were kept."""
    return [look.command for look in run.looks[-_FEW:] if look.command is not None]


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


def settings_line(scaler: ScalerHistory) -> str:
    """Returns a scaler's settings."""
    now = _arguments(scaler.arguments) if scaler.arguments is not None else "settings not in the log"
    if scaler.growth_tracker is not None:
        now += f"; {words.count(scaler.growth_tracker, 'step')} since the scale last changed"
    return now


def _arguments(arguments: ScalerArguments) -> str:
    return (
        f"init_scale={words.setting(arguments.init_scale)}, growth_factor={words.setting(arguments.growth_factor)}, "
        f"backoff_factor={words.setting(arguments.backoff_factor)}, growth_interval={arguments.growth_interval}"
    )


def _told(marks: Iterable[str]) -> str:
    there = list(marks)
    before = f"{len(there) - _FEW} before, " if len(there) > _FEW else ""
    return before + ", ".join(there[-_FEW:])


# -- plans --

FLUSHED_HEADINGS = ("nonzero gradients that fp16 makes zero", "kind", "before", "after", "with the new scale")
SHOWN_LAYERS = 8
_REFUSED = 2  # most plans that do not fit and are shown: the smallest ones


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


def plan_headings(section: PlanSection) -> tuple[str, ...]:
    """Return the column titles, without columns that no plan fills."""
    off, needs = _columns(section)
    figures = [title for title, there in (("off", off), ("a device needs", needs)) if there]
    return ("", "micro-batch x accumulation x ranks", *figures, " ")


def plan_rows(section: PlanSection) -> Iterator[list[str]]:
    """Yield a row for each plan, the current one first."""
    off, needs = _columns(section)

    def row(label: str, plan: PlannedBatch, note: str) -> list[str]:
        distance = f"{plan.off:+d} ({plan.off / section.global_batch:+.2%})" if plan.off else "0"
        size = "-" if plan.bytes_needed is None else gigabytes(plan.bytes_needed)
        return [label, product(plan), *([distance] if off else []), *([size] if needs else []), note]

    force = section.current
    if force is not None:
        yield row("in force", force.plan, "" if force.fits else "fits no more")
    marked = section.use is None
    refused = [plan for plan in section.exact if not plan.fits]
    for plan in section.exact:
        if plan in refused[:-_REFUSED]:
            continue  # larger plans that do not fit are only in the JSON
        label = "use" if not marked and plan.fits else ""
        marked = marked or bool(label)
        same = force is not None and plan.micro_batch == force.plan.micro_batch
        fits = "the micro-batch in force" if same else ""
        larger = len(refused) - _REFUSED if plan in refused[-_REFUSED:][:1] else 0
        yield row(label, plan, fits if plan.fits else _unfit(plan, larger))
    if section.fewer is not None:
        idle = section.after.devices - section.fewer.devices
        yield row("exact", section.fewer, f"{idle} of {words.count(section.after.devices, 'device')} idle")
    for index, plan in enumerate(section.nearest):
        yield row("" if index else "nearest", plan, "" if plan.fits else _unfit(plan, 0))


def _unfit(plan: PlannedBatch, larger: int) -> str:
    """Return that a plan does not fit, or is not known to fit, with the number of larger ones that are not shown."""
    said, one, several = ("not known to fit", "is", "are") if plan.fits is None else ("does not fit", "does", "do")
    return f"{said}; nor {one if larger == 1 else several} {words.count(larger, 'larger one')}" if larger > 0 else said


def changes_title(section: PlanSection) -> str:
    """Return a title with the plan that the changes belong to."""
    plan = section.use or next(iter((*section.exact, *section.nearest)), None)
    what = "what it changes" if plan is None else f"what it changes: {product(plan)}"
    return f"{what} (why: docs/plan.md)"


def _columns(section: PlanSection) -> tuple[bool, bool]:
    """Whether some plan misses the global batch, and whether one has a size."""
    plans = [*section.exact, *section.nearest]
    return any(plan.off for plan in plans), any(plan.bytes_needed is not None for plan in plans)


def memory_rows(section: PlanSection) -> Iterator[tuple[str, str]]:
    """Yield what fits, and why."""
    memory = section.memory
    if section.current is not None:
        yield "in force", section.current.source
    yield "fits", f"a micro-batch of up to {memory.max_micro_batch}: {memory.limited_by}"
    if memory.states_after is not None:
        was = "" if memory.states_before is None else f"{gigabytes(memory.states_before)} -> "
        yield "states", f"{was}{gigabytes(memory.states_after)} of parameters, gradients and optimizer a device"
    for note in memory.notes:
        yield "note", note


def flushed_title(flushed: FlushedByPlan) -> str:
    """Return the loss scale that keeps what fp16 keeps now."""
    kept = f"init_scale {words.setting(flushed.init_scale)} keeps fp16's gradients as they are"
    if flushed.bound_by is not None:
        kept = f"init_scale {words.setting(flushed.init_scale)}: at a higher one {flushed.bound_by} would overflow"
    return f"{kept}; now it is {words.setting(flushed.scale)} ({flushed.profile})"


def flushed_rows(flushed: FlushedByPlan, *, layers: int | None) -> Iterator[list[str]]:
    """Yield the totals, then the gradients that change most."""
    for one in (*flushed.totals, *flushed.layers[:layers]):
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


def gigabytes(count: float) -> str:
    """Return bytes as gigabytes of 10^9."""
    return f"{count / 1e9:.3g} GB"


# -- profiles: the formats, and the layers that lose most --

KINDS: Mapping[str, str] = {"activation_grad": "dA", "weight_grad": "dW", "activation": "A", "weight": "W"}
GRADIENTS = ("activation_grad", "weight_grad")
ABOUT = "(dA: of activations, dW: of weights)"
SUMMARY_HEADINGS = ("format", "", "flushed", "subnormal", "overflow", "error")
LAYER_HEADINGS = ("", "fp16", "measured", "fits", "e5m2")
NOT_MEASURED = "not measured: no gradient of a half tensor is finite and nonzero"
FEW = 12  # most layers that are shown without -v: those that lose most
_ROWS = ("fp16", "fp16_recommended", "fp16_unscaled", "bf16", "e4m3fn", "e5m2")

Site: TypeAlias = Mapping[str, Any]
Place: TypeAlias = tuple[str, str, str]


def measured_gradients(profile: Mapping[str, Any]) -> bool:
    """Whether any gradient had a value to measure."""
    rows = (profile.get("summary") or {}).values()
    return any(figures.get("flushed") is not None for kinds in rows for figures in kinds.values())


def summary_rows(profile: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows below SUMMARY_HEADINGS; a format is named once, beside its first kind."""
    summary = profile.get("summary") or {}
    scales = {
        "fp16": words.binary(profile.get("loss_scale")),
        "fp16_recommended": f"{words.binary(profile.get('recommended_scale'))} (fits)",
        "fp16_unscaled": "1",
    }
    rows = []
    for name in sorted(summary, key=lambda n: (_ROWS.index(n) if n in _ROWS else len(_ROWS), n)):
        title = f"fp16 at {scales[name]}" if name in scales else name.replace("_", " ")
        for index, (kind, figures) in enumerate(summary[name].items()):
            shares = [words.percent(figures.get(key)) for key in ("flushed", "subnormal", "overflowed")]
            error = words.short(figures.get("relative_error"))
            rows.append(["" if index else title, KINDS.get(kind, kind.replace("_", " ")), *shares, error])
    return rows


def half_sites(profile: Mapping[str, Any]) -> list[Site]:
    """Return the places in half precision with at least one counted magnitude."""
    sites = (site for site in profile.get("sites") or () if site.get("half"))
    return [site for site in sites if (site.get("histogram") or {}).get("bins")]


def measured_of(profile: Mapping[str, Any]) -> dict[Place, float]:
    """Return the measured flushed share at the run's own loss scale, by place."""
    shadows = [s for s in profile.get("shadows") or () if s["scale"] == profile.get("loss_scale")]
    return {_place(site): site["measured"] for shadow in shadows for site in shadow["sites"]}


def worst_first(sites: Sequence[Site], measured: Mapping[Place, float]) -> list[Site]:
    """Return the places, those that lose most first."""

    def loss(site: Site) -> tuple[float, float, str, str]:
        """Returns the measured loss first, if any: the flushed gradient of a bias may be noise that cancels."""
        here = _flushed(site, "fp16") or 0.0
        return -measured.get(_place(site), here), -here, site["name"], site["kind"]

    return sorted(sites, key=loss)


def layer_name(site: Site) -> str:
    """Return a place's name for people, not yet sanitised."""
    return (site["name"] or "model") + (".input" if site["part"] == "input" else "")


def layer_cells(site: Site, measured: Mapping[Place, float]) -> list[str]:
    """Return the cells below LAYER_HEADINGS: shares flushed in fp16, measured, at the fitting scale, and in e5m2."""
    shares = [
        _flushed(site, "fp16"),
        measured.get(_place(site)),
        _flushed(site, "fp16_recommended"),
        _flushed(site, "e5m2"),
    ]
    return [KINDS.get(site["kind"], site["kind"]), *map(words.percent, shares)]


def _flushed(site: Site, row: str) -> float | None:
    flushed: float | None = site["formats"].get(row, {}).get("flushed")
    return flushed


def _place(site: Site) -> Place:
    return site["name"], site["kind"], site["part"]


def ahead(exceedances: float | str, horizon: int | None) -> str:
    """Return how many of the steps ahead may exceed every recorded one; `exceedances` may be the text "NaN"."""
    if isinstance(exceedances, str) or math.isnan(exceedances):
        many = "nobody knows how many"
    else:
        many = f"about {exceedances:,.0f}" if exceedances >= 1.0 else "fewer than 1"
    steps = "the steps" if horizon is None else f"the {horizon:,} steps"
    return f"of {steps} ahead, {many} will have a larger gradient than any of them"
