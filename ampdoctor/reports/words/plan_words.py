"""The words of a plan: its line, its tables, and what each row says."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.evidence.report_plan import (
    FlushedByPlan,
    FlushedOfPlan,
    LeftAsItIs,
    PlannedBatch,
    PlannedCluster,
    PlanSection,
)
from ampdoctor.reports.words import words

LEFT_HEADINGS = ("framework", "trains with", "because")
FLUSHED_HEADINGS = ("nonzero gradients that fp16 makes zero", "kind", "before", "after", "with the new scale")
_OUTCOMES = {"kept": "", "silent": ", silently", "refused": "refuses"}
SHOWN_LAYERS = 8
_REFUSED = 2
"""Plans that do not fit and are shown: the smallest of them."""


def title(section: PlanSection) -> str:
    """What is planned, in a line."""
    was = "" if section.before is None else f"{cluster(section.before)} -> "
    return f"{section.global_batch} samples a step: {was}{cluster(section.after)}"


def cluster(one: PlannedCluster) -> str:
    """The devices, and the ranks that see other samples where those are fewer."""
    sizes = {"tp": one.tensor, "pp": one.pipeline, "cp": one.context}
    parallel = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    devices = words.count(one.devices, "device")
    return f"{devices} / ({parallel}) = {one.data_parallel} data parallel" if parallel else devices


def product(plan: PlannedBatch) -> str:
    """A plan as its product."""
    return f"{plan.micro_batch} x {plan.accumulation} x {plan.data_parallel} = {plan.global_batch}"


def plan_headings(section: PlanSection) -> tuple[str, ...]:
    """The columns: what no plan has a figure for is left out."""
    off, needs = _columns(section)
    figures = [title for title, there in (("off", off), ("a device needs", needs)) if there]
    return ("", "micro-batch x accumulation x ranks", *figures, " ")


def plan_rows(section: PlanSection) -> Iterator[list[str]]:
    """A row for each plan, the one in force first."""
    off, needs = _columns(section)

    def row(label: str, plan: PlannedBatch, note: str) -> list[str]:
        distance = f"{plan.off:+d} ({plan.off / section.global_batch:+.2%})" if plan.off else "0"
        size = "-" if plan.bytes_needed is None else gigabytes(plan.bytes_needed)
        return [label, product(plan), *([distance] if off else []), *([size] if needs else []), note]

    force = section.in_force
    if force is not None:
        yield row("in force", force.plan, "" if force.fits else "fits no more")
    marked = section.use is None
    refused = [plan for plan in section.exact if not plan.fits]
    for plan in section.exact:
        if plan in refused[:-_REFUSED]:
            continue  # a table of what nobody can run helps nobody; the JSON has them
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
    """That a plan does not fit, or is not known to, and so many larger ones that are not shown."""
    said, one, several = ("not known to fit", "is", "are") if plan.fits is None else ("does not fit", "does", "do")
    return f"{said}; nor {one if larger == 1 else several} {words.count(larger, 'larger one')}" if larger > 0 else said


def changes_title(section: PlanSection) -> str:
    """Of which plan the changes are."""
    plan = section.use or next(iter((*section.exact, *section.nearest)), None)
    return "what it changes" if plan is None else f"what it changes: {product(plan)}"


def _columns(section: PlanSection) -> tuple[bool, bool]:
    """Whether some plan is off, and whether one has a size."""
    plans = [*section.exact, *section.nearest]
    return any(plan.off for plan in plans), any(plan.bytes_needed is not None for plan in plans)


def memory_rows(section: PlanSection) -> Iterator[tuple[str, str]]:
    """What fits, and why."""
    memory = section.memory
    if section.in_force is not None:
        yield "in force", section.in_force.source
    yield "fits", f"a micro-batch of up to {memory.max_micro_batch}: {memory.limited_by}"
    if memory.states_after is not None:
        was = "" if memory.states_before is None else f"{gigabytes(memory.states_before)} -> "
        yield "states", f"{was}{gigabytes(memory.states_after)} of parameters, gradients and optimizer a device"
    for note in memory.notes:
        yield "note", note


def left_rows(section: PlanSection) -> Iterator[list[str]]:
    """A row for each framework."""
    for one in section.left_as_it_is:
        yield [one.framework, _trains(one), one.said]


def _trains(one: LeftAsItIs) -> str:
    return f"{'' if one.global_batch is None else one.global_batch}{_OUTCOMES[one.outcome]}"


def flushed_title(flushed: FlushedByPlan) -> str:
    """Which loss scale keeps what fp16 keeps now."""
    kept = f"init_scale {words.setting(flushed.init_scale)} keeps fp16's gradients as they are"
    if flushed.bound_by is not None:
        kept = f"init_scale {words.setting(flushed.init_scale)}: at a higher one {flushed.bound_by} would overflow"
    return f"{kept}; now it is {words.setting(flushed.scale)} ({flushed.profile})"


def flushed_rows(flushed: FlushedByPlan, *, layers: int | None) -> Iterator[list[str]]:
    """The totals, then the gradients that change most."""
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
    """Bytes as gigabytes of 10^9."""
    return f"{count / 1e9:.3g} GB"
