"""`ampdoctor plan`, and the batch that the log of a watched run shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mode

from ampdoctor.batching.effects import changes, flushed_plan, has_scale
from ampdoctor.batching.emitting import emit_plan
from ampdoctor.batching.plans import (
    BatchPlan,
    BatchSettings,
    Cluster,
    Memory,
    PlanRequest,
    current_plan,
    exact_plans,
    global_batch_of,
    most_ranks_that_divide,
    nearest_plans,
)
from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.evidence.log_records import LogRecord, RunLine, StepLine
from ampdoctor.evidence.report import Report, Skipped, verdict_of
from ampdoctor.evidence.report_plan import BatchInForce, DeviceMemory, FlushedByPlan, PlannedBatch, PlanSection
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import find_log

RULE = "largest micro-batch first"


def plan(request: PlanRequest) -> Report:
    """Returns all ways to keep the global batch on another cluster, and what the first one changes."""
    section = plan_section(request)
    if request.profile is not None and has_scale(request.said):
        section = replace(section, flushed=_flushed(request, section))
    findings = judge(section)
    options = {} if request.config is None else {"path": request.config}
    return Report(
        command="plan",
        target=options,
        run={"notes": list(request.said.notes)} if request.said.notes else {},
        verdict=verdict_of(findings),
        findings=findings,
        skipped=tuple(_left_out(request, section)),
        plan=section,
    )


def _left_out(request: PlanRequest, section: PlanSection) -> Iterator[Skipped]:
    if request.emit is not None and section.emit is None:
        yield Skipped(what=f"--emit {request.emit}", reason="no plan here is exact and fits, and none is rounded")
    if request.profile is not None and not has_scale(request.said):
        yield Skipped(
            what=f"--profile {request.profile}",
            reason=f"a job in {request.said.precision} has no loss scale, and no gradient in fp16 that could flush",
        )


def plan_section(request: PlanRequest) -> PlanSection:
    """Returns the section of the report; arguments and errors as for `plan`."""
    ranks = None if request.before is None else request.before.data_parallel
    fitted = None if request.before is None else request.memory.most(request.before, request.before)
    plan_before, source = current_plan(request.said, ranks, fitted)
    memory = _known_to_fit(request, plan_before)
    batch = global_batch_of(request.said, plan_before)
    most = memory.most(request.before, request.after)
    if most is None:
        raise UsageError(
            "what fits a device is not known: --max-micro-batch says it, or --memory-per-sample and --device-memory"
        )
    cluster = request.after
    # whether something says what does not fit; the micro-batch in force is no bound
    given = request.memory
    bounded = (given.known_to_fit, given.device, given.per_sample) != (None, None, None)

    def shown(one: BatchPlan, cluster: Cluster) -> PlannedBatch:
        return PlannedBatch(
            micro_batch=one.micro_batch,
            accumulation=one.accumulation,
            data_parallel=one.data_parallel,
            global_batch=one.global_batch,
            off=one.global_batch - batch,
            devices=cluster.devices,
            bytes_needed=memory.needs(one.micro_batch, cluster),
            fits=True if one.micro_batch <= most else False if bounded else None,
        )

    exact = tuple(shown(one, cluster) for one in exact_plans(batch, cluster.data_parallel, batch))
    near = () if exact else nearest_plans(batch, cluster.data_parallel, most)
    fewer = None
    if not exact:
        smaller = cluster.with_data_parallel(most_ranks_that_divide(batch, cluster.data_parallel))
        fitting = exact_plans(batch, smaller.data_parallel, most)
        fewer = shown(fitting[0], smaller) if fitting else None
    first = exact_plans(batch, cluster.data_parallel, most)[:1]
    force = None
    if plan_before is not None and request.before is not None:
        was = shown(plan_before, request.before)
        force = BatchInForce(plan=replace(was, fits=True), source=source, fits=bool(was.fits))
    section = PlanSection(
        global_batch=batch,
        before=request.before,
        after=cluster,
        current=force,
        rule=RULE,
        exact=exact,
        nearest=tuple(shown(one, cluster) for one in near),
        fewer=fewer,
        memory=_memory(request, memory, most),
        emit=emit_plan(first[0], cluster, request.emit) if first and request.emit is not None else None,
    )
    planned_for = next(iter((*first, *near)), None)
    if planned_for is None or plan_before is None or request.before is None:
        return section
    return replace(section, changes=changes(plan_before, planned_for, request.said))


def _flushed(request: PlanRequest, section: PlanSection) -> FlushedByPlan | None:
    if section.current is None:
        raise UsageError("--profile shows what another plan does: --gpus, and what else is in force, say what it was")
    to = section.use or next(iter(section.nearest), None)
    if to is None:
        return None
    # here: these bring torch, which nothing else of a plan needs
    from ampdoctor.workflows.profile import ranges_in

    file = request.profile or ""
    reduction = request.said.reduction or "mean"
    return flushed_plan(ranges_in(file), section.current.plan, to, reduction, file=file)


def _known_to_fit(request: PlanRequest, before: BatchPlan | None) -> Memory:
    """Returns the memory's figures; where the user has not said what fits, the micro-batch in force does."""
    memory = request.memory
    if memory.known_to_fit is None and memory.device is None and before is not None:
        return replace(memory, known_to_fit=before.micro_batch)
    return memory


def _memory(request: PlanRequest, memory: Memory, most: int) -> DeviceMemory:
    states = memory.states
    before, after = request.before, request.after
    notes: list[str] = []
    grown = memory.growth(before, after)
    if grown and memory.per_sample is None:
        notes.append(
            f"The states of a device {'grow' if grown > 0 else 'shrink'} by {gigabytes(abs(grown))}: how many samples "
            "that is, --memory-per-sample says; until then the largest micro-batch is taken to fit as before."
        )
    if before is not None and any(
        getattr(before, of) != getattr(after, of) for of in ("tensor", "pipeline", "context")
    ):
        notes.append(
            "Other parallel sizes change what a sample takes on a device: what was measured before holds no longer."
        )
    return DeviceMemory(
        device=memory.device,
        per_sample=memory.per_sample,
        states_before=None if states is None or before is None else states.on(before),
        states_after=None if states is None else states.on(after),
        max_micro_batch=most,
        limited_by=_limit(request, memory, most),
        notes=tuple(notes),
    )


def _limit(request: PlanRequest, memory: Memory, most: int) -> str:
    states = None if memory.states is None else memory.states.on(request.after)
    kept = memory.known_to_fit
    if kept is not None and kept - memory.lost_samples(request.before, request.after) <= most:
        lost = memory.lost_samples(request.before, request.after)
        source = "the micro-batch in force" if request.memory.known_to_fit is None else "--max-micro-batch"
        if not lost:
            return f"{source} {kept}"
        grown = gigabytes(memory.growth(request.before, request.after))
        return f"{source} {kept}, less {lost} for the {grown} by which the states of a device grow"
    beside = "" if states is None else f" - {gigabytes(states)} of states"
    return f"({gigabytes(memory.device or 0.0)}{beside}) / {gigabytes(memory.per_sample or 0.0)} a sample = {most}"


def gigabytes(count: float) -> str:
    """Returns bytes as gigabytes of 10^9."""
    return f"{count / 1e9:.3g} GB"


# -- batch and memory from a watched run's log --


def batch_of_log(path: str) -> BatchSettings:
    """Returns what a run's log has measured of it; each rank is taken to see other samples. May raise UsageError."""
    try:
        found = find_log(Path(path))
        return _measured(found.lines(ReadIssues()), path)
    except CheckpointError as error:
        raise UsageError(f"the log cannot be read: {error}") from None


def _measured(lines: Iterable[LogRecord], path: str) -> BatchSettings:
    devices, precision, peak = 1, None, 0
    steps, counted = [], []
    for one in lines:
        devices = max(devices, one.stamp.world_size)
        if isinstance(one.line, RunLine):
            precision = one.line.precision or precision
        elif isinstance(one.line, StepLine) and one.line.optimizer == 0:
            steps.append(one.line.micro_steps or 1)
            peak = max(peak, one.line.memory_bytes or 0)
            if one.stamp.rank == 0 and one.line.samples is not None:
                counted.append((one.line.step, one.line.samples))
    if not steps:
        raise UsageError(f"{path} is a log without a step")
    accumulation = mode(steps)  # an epoch's last step may be shorter
    grown = [(b - a) // (at - was) for (was, a), (at, b) in pairwise(counted) if at > was]
    batch = mode(grown) if grown else 0
    micro, left = divmod(batch, accumulation * devices)
    return BatchSettings(
        devices=devices,
        accumulation=accumulation,
        micro_batch=micro if micro and not left else None,
        precision=precision if precision in ("fp32", "tf32", "bf16", "fp16", "fp8") else None,  # type: ignore[arg-type]
        peak_memory=peak or None,
        notes=("The batch in force is what the run's log has counted.",),
    )
