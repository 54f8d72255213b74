"""Notes of a `bisect-nan` report: what was not examined and why, the tightest headroom, the path of a NaN."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ampdoctor.diagnosis.catalogue import figure, scale_text
from ampdoctor.diagnosis.replay.outcome import KnownFailure, known_failure, not_reproduced_finding
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import NOT_IN_HALF, Check, ErrorNote, Finding, Skipped
from ampdoctor.evidence.report_replay import NodeRole, PathNode, PathSection
from ampdoctor.evidence.trace import Headroom, NonFiniteOrigin, PathOp, StepOutcome
from ampdoctor.precision.casting import HALVES
from ampdoctor.probes.formats_seen import AutocastProbe, FormatsProbe, Region
from ampdoctor.probes.modules import optimizer_parameters
from ampdoctor.probes.nonfinite import Observation
from ampdoctor.probes.user_code import as_source
from ampdoctor.replay.session import Session
from ampdoctor.replay.snapshot import Snapshot
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.workflows.open_replay import OpenReplay
from ampdoctor.workflows.requests import ReplayRequest

# -- the tightest headroom of a healthy run --

TIGHTEST_HEADROOM = "tightest headroom"


def headroom_check(
    tightest: Headroom | None, outcomes: Sequence[StepOutcome], request: ReplayRequest
) -> Iterator[Check]:
    """Yields one check on `tightest`, of the steps without harm or skip; none if no step was replayed."""
    beside = ""
    if request.until_sick:
        beside = "; --until-sick looks at no layer's output until a step fails"
    if tightest is None:
        if outcomes:
            said = f"not measured: no tensor in a half-precision format was looked at in a step without harm{beside}"
            yield Check(name=TIGHTEST_HEADROOM, result=said)
        return
    scale = next((o.scale_before for o in outcomes if o.step == tightest.step), None)
    gradient = tightest.kind != "output"
    module = tightest.module or "the model"
    what = {
        "output": f"the output of {module}",
        "output_grad": f"the gradient that arrives at the output of {module}",
        "grad": f"a parameter's gradient in {module}",
    }[tightest.kind]
    scaled = f", scaled by {scale_text(scale)}," if gradient and scale not in (None, 1.0) else ""
    yield Check(
        name=TIGHTEST_HEADROOM,
        result=f"a factor of {2.0**tightest.log2:.3g}: {what}{scaled} reaches {figure(tightest.amax)} in step "
        f"{tightest.step}, and {tightest.format}'s largest value is {figure(tightest.limit)}{beside}",
        headroom={
            "log2": tightest.log2,
            "module": tightest.module,
            "phase": "backward" if gradient else "forward",
            "tensor": tightest.kind,
            "format": tightest.format,
            "amax": tightest.amax,
            "limit": tightest.limit,
            "loss_scale": scale if gradient else None,
            "step": tightest.step,
        },
    )


# -- steps that show too little to be called healthy --


def unexamined(
    session: Session, outcomes: Sequence[StepOutcome], observed: Sequence[tuple[Observation, ...]]
) -> ErrorNote | None:
    """Returns what all of these steps lacked, so that nothing could be examined; None where enough was seen."""
    if not saw_anything(outcomes, observed):
        return ErrorNote(what="steps", kind="empty", message="no step had a loss or a gradient: nothing was examined")
    if not _trains(session, outcomes, observed):
        said = "no parameter of the model or of an optimizer requires a gradient: nothing trains, and only the forward"
        return ErrorNote(what="parameters", kind="empty", message=f"{said} was looked at")
    return None


def never_updated(outcomes: Sequence[StepOutcome], *, moves: bool) -> ErrorNote | None:
    """Returns the note on a run whose steps neither call an optimizer nor move (`moves`) a parameter that one holds."""
    called = any(event.kind in ("step", "optimizer_step") for outcome in outcomes for event in outcome.events)
    if moves or called or any(outcome.optimizer_steps or outcome.raised for outcome in outcomes):
        return None
    said = f"no optimizer stepped in {len(outcomes)} replayed steps and no parameter moved, so no update was examined"
    change = "call optimizer.step() (or scaler.step(optimizer)) in the step; a step that accumulates needs more --steps"
    return ErrorNote(what="updates", kind="empty", message=f"{said}: {change}")


def saw_anything(outcomes: Sequence[StepOutcome], observed: Sequence[tuple[Observation, ...]]) -> bool:
    """Whether a step had a loss or a gradient."""
    return _graded(observed) or any(outcome.loss is not None for outcome in outcomes)


def _trains(session: Session, outcomes: Sequence[StepOutcome], observed: Sequence[tuple[Observation, ...]]) -> bool:
    parameters = (*session.model.parameters(), *optimizer_parameters(session))
    # a pure function has no parameters
    free = not parameters or any(parameter.requires_grad for parameter in parameters)
    return free or _graded(observed) or any(outcome.optimizer_steps for outcome in outcomes)


def _graded(observed: Sequence[tuple[Observation, ...]]) -> bool:
    return any(one.kind == "grad" for step in observed for one in step)


# -- what `until_sick` leaves out, and what is known when it is interrupted --

LAST_COMPARED = 8
"""Default number of steps at the end that are compared with fp32."""


def only_looked_at(steps: int, compared: int) -> Iterator[Skipped]:
    """Yields the note on steps that stayed finite but were not compared with fp32; `compared` counts the last ones."""
    if compared < steps:
        held = f"the last {compared} were held beside fp32" if compared else "none was held beside fp32 (--no-compare)"
        reason = f"--until-sick looks at each of the {steps} steps for NaN and Inf alone; {held}"
        yield Skipped(what="comparison of every step with fp32", reason=reason)


def interrupted(replay: OpenReplay, outcomes: Sequence[StepOutcome], fired: int | None) -> ErrorNote:
    """Returns what is known where Ctrl-C ends the search; `fired` is the non-finite step that was being examined."""
    well, step = len(outcomes) if fired is None else fired, replay.global_step
    globally = "" if step is None else f" (the training's {step} to {step + well - 1})"
    known = f"steps 0 to {well - 1} were replayed and stayed finite{globally}" if well else "no step ended"
    skips = sum(outcome.skipped for outcome in outcomes[:well])
    known += f", but for {skips} that the scaler skipped" if skips else ""
    at = "" if fired is None else f"; step {fired} is not finite, and was being looked into"
    return ErrorNote(what="steps", kind="interrupted", message=f"interrupted by Ctrl-C: {known}{at}")


# -- the run that failed, and its replay here --


def failed_run(replay: OpenReplay) -> KnownFailure | None:
    """Returns the failure that the user, the checkpoint or its log reports, or None."""
    request, resumed = replay.request, replay.resumed
    scaler = resumed.file_scaler if resumed is not None else None
    of_log = () if replay.log is None else replay.log.findings()
    loss = replay.saved_loss if replay.log is None else None
    return known_failure(of_log, loss, scaler, said=request.expect_failure)


def not_reproduced(known: KnownFailure, replay: OpenReplay, session: Session, steps: int) -> Finding:
    """Returns the note on a run that is known to fail, and of which so many `steps` stayed finite here."""
    run, wanted = replay.described(session, steps), replay.request.compare_steps
    cut = wanted is not None and wanted < steps and not (replay.request.until_sick and wanted)
    seen = {
        "global_step": replay.global_step,
        **{key: run[key] for key in _SEEN},
        **({"compared": wanted} if cut else {}),
    }
    return not_reproduced_finding(known, seen, [*_differences(known, replay, session, seen)])


_SEEN = ("steps", "device", "policy", "precision", "torch")


def _differences(known: KnownFailure, replay: OpenReplay, session: Session, seen: Mapping[str, Any]) -> Iterator[str]:
    """Yields clauses on what differs, or may differ, between the replay and the failed run, the likeliest first."""
    resumed, steps = replay.resumed, seen["steps"]
    compared = seen.get("compared")
    if compared is not None:
        held = f"only {compared} step{' was' if compared == 1 else 's were'}" if compared else "no step was"
        option = "--compare-steps" if compared else "--no-compare"
        yield f"{held} held beside fp32, where alone a failure shows that stays finite (leave out {option})"
    yield _steps(known, replay, steps, placed=session.tape.is_placed)
    if resumed is None:
        yield "the weights are as the factory makes them, not as they were when it failed (--checkpoint)"
    else:
        yield from (f"the checkpoint holds no {part}" for part in resumed.lacks)
    step = replay.global_step
    if session.tape.is_placed:
        yield f"the data are those that followed step {step}, as far as the factory gives them in that order"
    else:
        other = "" if step is None else f", not those that followed step {step}"
        yield f"the data are the first {steps} steps' batches of the factory{other}"
    if resumed is not None and resumed.file_scaler is not None and not session.events.enabled:
        yield f"it was trained with a GradScaler, in fp16, and is replayed in {seen['precision']} without one"
    if seen["device"] != "cpu":
        yield f"the device is {seen['device']} of this machine"
    elif seen["policy"] == "cuda":
        yield "the device is a CPU that casts as CUDA's autocast does: what only a GPU's kernel does is not seen"
    else:
        yield "the device is a CPU, with its own autocast list (--policy native)"
    yield "one process replays it: what hangs on the number of ranks is not seen"
    yield f"torch is {seen['torch']}"


def _steps(known: KnownFailure, replay: OpenReplay, steps: int, *, placed: bool) -> str:
    option, start = "--max-steps" if replay.request.until_sick else "--steps", replay.global_step
    if known.step is None or start is None:
        return f"only {steps} steps were replayed ({option})"
    if known.step <= start:
        return (
            f"it failed from step {known.step} on, before this checkpoint was saved at step {start}: one from before "
            f"step {known.step} starts nearer to it"
        )
    if known.step > start + steps:
        replayed = f"steps {start + 1} to {start + steps} were replayed ({option} {known.step - start} reaches it)"
        return f"it failed at step {known.step}, and {replayed}"
    data = "with the data that the factory gives for it" if placed else "but not with that step's data"
    return f"it failed at step {known.step}, which was replayed, {data}"


# -- a run that declares a half format but computes in another --


def nothing_in_half(
    session: Session, tightest: Headroom | None, start: Snapshot | None, fresh: Callable[[], Session]
) -> Skipped | None:
    """Returns what is left out for a run that declares a half format and computes in another; None for any other."""
    said = session.precision.compute
    if not session.precision.reduced or (tightest is not None and tightest.format == said):
        return None
    looked = FormatsProbe()
    if start is not None:
        start.restore()
        regions = _look(session, looked)
    else:
        other = fresh()
        try:
            regions = _look(other, looked)
        finally:
            other.close()
    decides = None if session.precision.dtype in looked.formats else _decides(looked, regions, session)
    if decides is None:
        return None
    computed = next(map(HALVES.__getitem__, looked.formats), "fp32")
    meant = f'where that is meant, say so: TrainingRun(precision="{computed}")'
    return Skipped(what=NOT_IN_HALF, reason=f"step 0 computes in {computed}: {decides}; {meant}", kind="not_in_half")


def _look(session: Session, looked: FormatsProbe) -> list[Region]:
    autocasts = AutocastProbe()
    with suppress(AmpdoctorError), session.watched(looked, autocasts):  # it ran before: an error here adds nothing
        if session.has_step(0):
            session.attempt(0)
    return autocasts.entered


def _decides(looked: FormatsProbe, regions: Sequence[Region], session: Session) -> str | None:
    """Returns what keeps the step from the declared format; None where that is the same on a GPU."""
    on = next((region for region in regions if region.enabled), None)
    if on is not None:
        if not (looked.formats and on.unnamed and on.dtype is not session.precision.dtype):
            return None
        own = f"autocast's own there is {HALVES.get(on.dtype, 'fp32')}"
        return f"autocast{_place(on)} names no dtype, and {own} (name dtype={session.precision.dtype})"
    if looked.formats:
        return None  # the model itself is in the other format
    if regions:
        return f"autocast{_place(regions[0])} is switched off there"
    if not session.precision.autocast:
        return "with autocast=False the factory itself gives model and batches their dtype, and they have float32"
    return f"{_function(session.run)} enters no autocast"


def _place(region: Region) -> str:
    source = as_source(region.line)
    return "" if source is None else f" at {source.file}:{source.line}"


def _function(run: TrainingRun) -> str:
    what, function = ("the step", run.step) if run.step is not None else ("the loss", run.loss)
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    source = None if code is None else as_source((code.co_filename, code.co_firstlineno))
    return what if source is None else f"{what} at {source.file}:{source.line}"


# -- section `path`: how an origin came about, and through which modules its values did harm --

MOST_CARRIERS = 200
"""Maximum number of carriers that are shown; of a longer way, the first and the last half."""


def path_section(origin: NonFiniteOrigin, fingerprint: str, types: Mapping[str, str]) -> PathSection:
    """Returns the way of one origin, in the order of the ops; `types` has each module's class name."""
    way = origin.way
    half = MOST_CARRIERS // 2
    long = len(way.carriers) > MOST_CARRIERS
    shown = (*way.carriers[:half], *way.carriers[-half:]) if long else way.carriers
    nodes = (
        *(_node("before", passage, types) for passage in way.before),
        _node("origin", _as_passage(origin), types),
        *(_node("carrier", passage, types) for passage in shown),
        *(_node("affected", passage, types) for passage in way.affected),
    )
    return PathSection(
        fingerprint=fingerprint,
        step=origin.where.step or 0,
        nodes=nodes,
        affected=tuple(origin.affected),
        omitted=way.omitted + len(way.carriers) - len(shown),
    )


def module_types(model: torch.nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the class names of a model's modules; `names` maps names in `named_modules()` to the report's."""
    return {names.get(name, name): type(module).__name__ for name, module in model.named_modules()}


def _as_passage(origin: NonFiniteOrigin) -> PathOp:
    outputs: Iterator[Any] = (stats for stats in origin.outputs if stats.nans or stats.infs)
    made = next(outputs, None)
    return PathOp(
        order=origin.order,
        where=origin.where,
        dtype=made.dtype if made is not None else "",
        shape=made.shape if made is not None else (),
        input_amax=max((stats.amax for stats in origin.inputs), default=None),
        amax=made.amax if made is not None else None,
        nans=made.nans if made is not None else 0,
        infs=made.infs if made is not None else 0,
    )


def _node(role: NodeRole, passage: PathOp, types: Mapping[str, str]) -> PathNode:
    where = passage.where
    return PathNode(
        role=role,
        order=passage.order,
        phase=where.phase,
        module=where.module,
        type=types.get(where.module, "") if where.module or where.phase in ("forward", "backward") else "",
        op=where.op or "",
        dtype=passage.dtype,
        shape=tuple(passage.shape),
        input_amax=passage.input_amax,
        output_amax=passage.amax,
        nan=passage.nans,
        inf=passage.infs,
        limit=_limit(passage.dtype),
        source=where.source or where.forward_source,
    )


def _limit(dtype: str) -> float | None:
    """Returns the largest finite number of a floating-point dtype; that of its parts for a complex one."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not (kind.is_floating_point or kind.is_complex):
        return None
    return torch.finfo(kind).max
