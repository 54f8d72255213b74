"""The state that a run gets from its checkpoint and log: its optimizer's state, and its loss scaling so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.checkpoints.optimizer_state import SECOND_MOMENTS
from ampdoctor.diagnosis.health.run_rules import NO_STEP_TAKEN, NO_SUCH_SCALE, SCALE_RATCHETS
from ampdoctor.diagnosis.replay.loaded_state import counter_finding, flushed_finding
from ampdoctor.diagnosis.replay.scaler_state import overwritten_finding, run_scaler_findings
from ampdoctor.diagnosis.scan.optimizer import STEP_LIMITS, explained
from ampdoctor.diagnosis.scan.scaler import collapse_severity, typical_gradient
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.run_facts import FlushedMoment, HalfCounter
from ampdoctor.probes.modules import optimizer_parameters
from ampdoctor.workflows.changes import no_change

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ampdoctor.evidence.report import Finding, Severity
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.changes import Change
    from ampdoctor.workflows.open_replay import OpenReplay
    from ampdoctor.workflows.trials import Trials


# -- impossible optimizer state: the first step with it, and with the state repaired --

MOST_STEPS = 8
"""Maximum number of replayed steps until an optimizer takes one: a loop that accumulates, or a scaler that skips at
first, may take none in the first."""


def impossible_state(
    session: Session, start: Snapshot, trials: Callable[[], Trials], thresholds: Thresholds
) -> list[Finding]:
    """Returns findings on optimizer state before step 0 that fp32 training cannot give, with the step that shows it.

    Nothing is replayed where nothing is suspect. `start` is the state before step 0, and `trials` makes its trials.
    """
    findings = []
    moments = list(_flushed(session))
    if moments:
        chosen = {moment.name for _, moment in moments}
        left = _first_step(session, start, no_change, _sizes)
        fresh = _first_step(session, start, begun_anew(chosen), _sizes)
        seen = [replace(m, update=left.get(id(p)), fresh=fresh.get(id(p))) for p, m in moments]
        finding = flushed_finding(seen, thresholds)
        if finding is not None:
            names = [where.tensor or "" for where in (finding.where, *finding.also)]
            detail = "Drop the optimizer state of these parameters; their own second moments are lost."
            cure = trials().attempt(
                "optimizer", {"reset_state": names}, begun_anew(names), detail, stands_in=True, restores=True
            )
            findings.append(replace(finding, prescription=cure))
    counters = list(_half_counters(session))
    if counters:
        left = _first_step(session, start, no_change, _counts)
        wide = _first_step(session, start, counting_in_fp32, _counts)
        finding = counter_finding(
            [replace(c, after=left.get(id(p)), widened=wide.get(id(p))) for p, c in counters], thresholds
        )
        if finding is not None and finding.severity != "note":
            detail = "Widen the step counters before they are loaded: state['step'] = state['step'].float()."
            value = "step counters in fp32"
            cure = trials().attempt("code", value, counting_in_fp32, detail, stands_in=True, restores=True)
            finding = replace(finding, prescription=cure)
        findings += [] if finding is None else [finding]
    return findings


def begun_anew(names: Collection[str]) -> Change:
    """Returns a change: the optimizer state of some parameters is dropped, so that the optimizer makes it anew."""

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        for owned in _owned(session):
            if owned.name in names:
                owned.optimizer.state.pop(owned.parameter, None)
        yield

    return change


@contextmanager
def counting_in_fp32(session: Session) -> Iterator[None]:
    """A change: step counters in a half format are widened."""
    for owned in _owned(session):
        step = _half_counter(owned)
        if step is not None:
            owned.state["step"] = step.float()
    yield


@dataclass(frozen=True, slots=True)
class _Owned:
    name: str
    module: str
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def betas(self) -> tuple[float, ...]:
        betas = self.group.get("betas")
        return tuple(map(float, betas)) if isinstance(betas, list | tuple) else ()


def _owned(session: Session) -> Iterator[_Owned]:
    names = session.parameter_names()
    for optimizer in session.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if isinstance(state, dict) and state:
                    name = names.get(id(parameter), "?")
                    yield _Owned(name, name.rpartition(".")[0], parameter, optimizer, group, state)


def _flushed(session: Session) -> Iterator[tuple[torch.Tensor, FlushedMoment]]:
    """Yields parameters whose second moment is zero where rounding does not explain it beside the first moment.

    Optimizers with a third state for each element are passed over: they may divide by that one, or keep these two in
    two bases.
    """
    for owned in _owned(session):
        epsilon = owned.group.get("eps")
        for entry, beside in SECOND_MOMENTS.items():
            second, first = owned.state.get(entry), owned.state.get(beside)
            others = [v for key, v in owned.state.items() if key not in ("step", entry, beside)]
            if not isinstance(second, torch.Tensor) or not isinstance(first, torch.Tensor):
                continue
            if any(isinstance(value, torch.Tensor) for value in others):
                continue
            if first.shape != second.shape or not second.is_floating_point() or not isinstance(epsilon, int | float):
                continue
            bound = explained(owned.betas, _smallest(second.dtype))
            lost = first[(second == 0) & (first.abs() > bound)].abs().float() if bound is not None else first[:0]
            if lost.numel() and bool(torch.isfinite(lost).all()):
                yield (
                    owned.parameter,
                    FlushedMoment(
                        name=owned.name,
                        module=owned.module,
                        entry=entry,
                        dtype=str(second.dtype).removeprefix("torch."),
                        starved=lost.numel(),
                        elements=second.numel(),
                        largest=float(lost.amax()),
                        epsilon=float(epsilon),
                    ),
                )


def _smallest(dtype: torch.dtype) -> float:
    """Returns the smallest number that a format keeps: fp16's subnormals are kept by every processor."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)


def _half_counters(session: Session) -> Iterator[tuple[torch.Tensor, HalfCounter]]:
    for owned in _owned(session):
        step = _half_counter(owned)
        if step is not None:
            yield (
                owned.parameter,
                HalfCounter(
                    name=owned.name,
                    module=owned.module,
                    dtype=str(step.dtype).removeprefix("torch."),
                    count=float(step),
                    betas=owned.betas,
                ),
            )


def _half_counter(owned: _Owned) -> torch.Tensor | None:
    step = owned.state.get("step")
    if not isinstance(step, torch.Tensor) or step.numel() != 1:
        return None
    return step if str(step.dtype).removeprefix("torch.") in STEP_LIMITS else None


def _first_step(
    session: Session, start: Snapshot, change: Change, measure: Callable[[_Owned, torch.Tensor], float | None]
) -> dict[int, float]:
    """Returns a figure of each parameter, by id, after the first step that an optimizer takes; restores the session."""
    start.restore()
    try:
        with change(session):
            for step in range(MOST_STEPS):
                if not session.has_step(step):
                    break
                before = {id(parameter): parameter.detach().clone() for parameter in optimizer_parameters(session)}
                if session.step(step).optimizer_steps:
                    found = ((owned, measure(owned, before[id(owned.parameter)])) for owned in _owned(session))
                    return {id(owned.parameter): figure for owned, figure in found if figure is not None}
    except AmpdoctorError:
        return {}  # an optimizer that makes its state only once
    finally:
        start.restore()
    return {}


def _sizes(owned: _Owned, before: torch.Tensor) -> float:
    return float((owned.parameter.detach().float() - before.float()).norm())


def _counts(owned: _Owned, before: torch.Tensor) -> float | None:  # noqa: ARG001 - as every measure
    step = owned.state.get("step")
    return float(step) if isinstance(step, torch.Tensor) and step.numel() == 1 else None


# -- loss scaling before the first replayed step: the scaler's settings, and its past in the log --


def history_findings(replay: OpenReplay) -> list[Finding]:
    """Returns the findings of `scaler_findings` and `log_findings`."""
    return [*scaler_findings(replay), *log_findings(replay)]


def scaler_findings(replay: OpenReplay) -> Iterator[Finding]:
    """Yields findings on the run's scaler before step 0, and on settings that a checkpoint overwrites."""
    if replay.scaler is not None:
        yield from run_scaler_findings(replay.scaler)
    scalers = replay.resumed.scalers if replay.resumed is not None else None
    lost = overwritten_finding(scalers) if scalers is not None else None
    if lost is not None:
        yield lost


_OF_SCALE = frozenset({SCALE_RATCHETS.code, NO_STEP_TAKEN.code, NO_SUCH_SCALE.code})


def log_findings(replay: OpenReplay) -> Iterator[Finding]:
    """Yields findings on the loss scale in the checkpoint's log, at most as warnings."""
    for finding in () if replay.log is None else replay.log.findings():
        if finding.code in _OF_SCALE:
            yield replace(finding, severity="warning") if finding.severity == "error" else finding


def saved_collapse(replay: OpenReplay, session: Session, thresholds: Thresholds) -> Severity | None:
    """Returns a scan's severity for the checkpoint's collapsed scale with which the run continues, or None."""
    resumed = replay.resumed
    if resumed is None or resumed.scalers is None or resumed.collapsed_from is None:
        return None
    weights = sum(parameter.numel() for parameter in session.model.parameters())  # frozen ones too, as in a scan
    element = typical_gradient(None if replay.log is None else replay.log.looked.tail, weights)
    return collapse_severity(resumed.scalers.now, element, resumed.global_step, thresholds)


def not_said_yet(findings: Iterable[Finding], said: Iterable[Finding]) -> list[Finding]:
    """Returns the findings whose code is not among `said`: a finding from a replay says more."""
    codes = {finding.code for finding in said}
    return [finding for finding in findings if finding.code not in codes]
