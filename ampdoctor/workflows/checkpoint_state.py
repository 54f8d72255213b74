"""The state that a run gets from its checkpoint and log: its optimizer's state, and its loss scaling so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.checkpoints.checkpoint import LiveState, TensorRef
from ampdoctor.checkpoints.optimizer_state import SECOND_MOMENTS
from ampdoctor.checkpoints.parameter_names import role_of_state
from ampdoctor.checkpoints.stored_tensor import LiveTensor
from ampdoctor.checkpoints.tensor_statistics import summarize
from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.health.run_rules import NO_STEP_TAKEN, NO_SUCH_SCALE, SCALE_RATCHETS
from ampdoctor.diagnosis.replay.scaler import overwritten_finding, run_scaler_findings
from ampdoctor.diagnosis.scan.optimizer import SECOND_MOMENT_FLUSHED as FLUSHED
from ampdoctor.diagnosis.scan.optimizer import STEP_COUNTERS as COUNTERS
from ampdoctor.diagnosis.scan.scaler import COLLAPSED_SCALER, DEAD_SCALER
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import finding_order
from ampdoctor.probes.nonfinite import holds_nan, is_nonfinite, state_tensors
from ampdoctor.workflows.repairs import repair

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ampdoctor.evidence.checkpoint_stats import TensorRole
    from ampdoctor.evidence.report import Finding
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.open_replay import OpenReplay
    from ampdoctor.workflows.trials import Trials

# -- weights, buffers and optimizer state before the first step, judged as those of a file --

_LOADED = frozenset({"AMP101", "AMP102", "AMP103", "AMP106", "AMP107", FLUSHED.code, COUNTERS.code})
_STATISTICS = ("running_mean", "running_var")
"""Buffers that hold no infinity on purpose; of the others only a step can show that they do harm."""


def state_findings(replay: OpenReplay, session: Session, thresholds: Thresholds) -> list[Finding]:
    """Returns what scan would say of a checkpoint with the run's present state, which is that before step 0."""
    with suppress(CheckpointError):  # nothing to measure
        summary = summarize(_as_saved(replay, session))
        replay.scanned = judge(replace(summary, log=None if replay.log is None else replay.log.looked.tail), thresholds)
    at_start = (replace(f, where=replace(f.where, step=0, phase="checkpoint", file=None)) for f in replay.scanned)
    loaded = [finding for finding in at_start if finding.code in _LOADED]
    # of state that the run has made itself, a note (parameters that joined late) says nothing about the step
    return loaded if replay.resumed is not None else [finding for finding in loaded if finding.severity != "note"]


def _as_saved(replay: OpenReplay, session: Session) -> LiveState:
    refs = [
        _ref(name, "weight" if kind == "param" else "buffer", name.rpartition(".")[2], tensor)
        for kind, name, tensor in state_tensors(session)
        if kind == "param" or (kind == "buffer" and name.rpartition(".")[2] in _STATISTICS)
    ]
    names, optimizers = session.parameter_names(), {}
    for path, optimizer in session.optimizers.items():
        group = path if len(session.optimizers) > 1 else ""
        for owner, state in optimizer.state.items():
            refs += [
                _ref(names.get(id(owner), "?"), role_of_state(key), key, value, group)
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            ]
        optimizers[path] = {
            "state": dict(enumerate(_stored(state) for state in optimizer.state.values())),
            "param_groups": [_stored(group) for group in optimizer.param_groups],
        }
    resumed = replay.resumed
    scaler = None if resumed is None else resumed.file_scaler
    step = None if resumed is None else resumed.global_step
    return LiveState(refs, optimizers, () if scaler is None else (scaler,), step)


def _ref(name: str, role: TensorRole, entry: str, tensor: torch.Tensor, group: str = "") -> TensorRef:
    module = name.rpartition(".")[0]
    return TensorRef(name=name, role=role, entry=entry, module=module, group=group, file="", stored=LiveTensor(tensor))


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: LiveTensor(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def holds_nonfinite(session: Session) -> bool:
    """Whether parameters, running statistics or optimizer state hold NaN, or infinities that are no frozen mask."""
    return any(
        holds_nan(tensor) if kind == "param" and not tensor.requires_grad else is_nonfinite(tensor)
        for kind, name, tensor in state_tensors(session)
        if kind != "buffer" or name.rpartition(".")[2] in _STATISTICS
    )


def with_trials(findings: Sequence[Finding], trials: Trials) -> list[Finding]:
    """Returns findings of `state_findings` with a replay in which the state is repaired; broken values first."""
    broken = [f for f in findings if f.severity == "error" and f.code not in (FLUSHED.code, COUNTERS.code)]
    if broken:
        cure = repair([where for finding in broken for where in (finding.where, *finding.also)], trials)
        return [replace(finding, prescription=cure) if finding in broken else finding for finding in findings]
    return [_with_trial(finding, trials) for finding in findings]


def _with_trial(finding: Finding, trials: Trials) -> Finding:
    if finding.code == FLUSHED.code and finding.prescription is not None:
        detail = "Drop the optimizer state of these parameters; their own second moments are lost."
        value = finding.prescription.value
        cure = trials.attempt("optimizer", value, rebuilt_run, detail, stands_in=True, restores=True)
    elif finding.code == COUNTERS.code and finding.severity != "note":
        detail = "Widen the step counters before they are loaded: state['step'] = state['step'].float()."
        value = "step counters in fp32"
        cure = trials.attempt("code", value, counting_in_fp32, detail, stands_in=True, restores=True)
    else:
        return finding
    return replace(finding, prescription=cure)


@contextmanager
def rebuilt_run(session: Session) -> Iterator[None]:
    """A change: optimizer state is dropped where a second moment is zero and its first moment is not."""
    for optimizer in session.optimizers.values():
        for parameter, state in list(optimizer.state.items()):
            if _is_flushed(state):
                del optimizer.state[parameter]
    yield


def _is_flushed(state: Mapping[str, Any]) -> bool:
    pairs = ((state.get(second), state.get(first)) for second, first in SECOND_MOMENTS.items())
    return any(
        isinstance(second, torch.Tensor)
        and isinstance(first, torch.Tensor)
        and first.shape == second.shape
        and bool(((second == 0) & (first != 0)).any())
        for second, first in pairs
    )


@contextmanager
def counting_in_fp32(session: Session) -> Iterator[None]:
    """A change: step counters in a half format are widened."""
    for optimizer in session.optimizers.values():
        for state in optimizer.state.values():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and step.dtype in (torch.float16, torch.bfloat16):
                state["step"] = step.float()
    yield


def saved_scale(replay: OpenReplay) -> Finding | None:
    """Returns scan's finding that the checkpoint's loss scale is dead or has collapsed (AMP401, AMP402)."""
    codes = {DEAD_SCALER.code, COLLAPSED_SCALER.code}
    found = next((finding for finding in replay.scanned if finding.code in codes), None)
    if found is None or replay.request.fresh_scaler:
        return None
    return replace(found, where=replace(found.where, step=0))


# -- loss scaling before the first replayed step: the scaler's settings, and its past in the log --


_OF_SCALE = frozenset({SCALE_RATCHETS.code, NO_STEP_TAKEN.code, NO_SUCH_SCALE.code})


def history_findings(replay: OpenReplay) -> list[Finding]:
    """Returns findings on the run's scaler before step 0, what a checkpoint overwrites of it, and its log's past.

    Of each rule on the log the worst finding, at most as a warning.
    """
    found = [] if replay.scaler is None else [*run_scaler_findings(replay.scaler, replay.request.thresholds)]
    scalers = replay.resumed.scalers if replay.resumed is not None else None
    lost = overwritten_finding(scalers) if scalers is not None else None
    worst: dict[str, Finding] = {}
    for finding in () if replay.log is None else replay.log.findings():
        known = worst.get(finding.code)
        if finding.code in _OF_SCALE and (known is None or finding_order(finding) < finding_order(known)):
            worst[finding.code] = finding
    of_log = (replace(one, severity="warning") if one.severity == "error" else one for one in worst.values())
    return [*found, *([] if lost is None else [lost]), *of_log]


def not_said_yet(findings: Iterable[Finding], said: Iterable[Finding]) -> list[Finding]:
    """Returns the findings whose code is not among `said`: a finding from a replay says more."""
    codes = {finding.code for finding in said}
    return [finding for finding in findings if finding.code not in codes]
