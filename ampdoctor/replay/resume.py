"""Putting a checkpoint into a run before step 0: weights, buffers, optimizer and scaler, or nothing at all.

Everything is checked before anything is loaded, so that a refusal leaves the run as the factory made it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ampdoctor.checkpoints.contents.scalers import scaler_state
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.of_runs.scaler_settings import ResumedScaler
from ampdoctor.replay.resume_optimizers import plan_optimizers
from ampdoctor.replay.resume_weights import plan_weights
from ampdoctor.replay.user_code import user_code

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ampdoctor.evidence.of_checkpoints.checkpoint import ScalerState
    from ampdoctor.replay.training_run import TrainingRun


_SETTINGS = {"growth_factor", "backoff_factor", "growth_interval"}


class CheckpointState(Protocol):
    """What is needed of a checkpoint; a Protocol so that tests and library users can resume from plain dicts."""

    @property
    def model(self) -> Mapping[str, torch.Tensor] | None:
        """The model's state dict, names as stored."""

    @property
    def optimizers(self) -> Mapping[str, dict[str, Any]]:
        """Optimizer state dicts by name or path."""

    @property
    def scaler(self) -> Mapping[str, Any] | None:
        """GradScaler state dict."""

    @property
    def global_step(self) -> int | None:
        """Training step at which it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What of a checkpoint is now in the run, and what is not.

    Attributes:
        loaded: Of "weights", "optimizer", "scaler" those that were put in; ("hook",) where `run.load` did it all.
        tensors: Number of tensors of the model that were loaded.
        missing: Names of the model that the file does not have; empty unless partial loading was allowed.
        unexpected: Keys of the file that the model does not have; likewise.
        mismatched: Names whose shapes differ; likewise.
        lacks: What the run has and the file does not: "weights", "optimizer", "scaler".
        notes: What was done on the way that changes values or settings, each a sentence.
        global_step: The checkpoint's training step, if it says.
        file_scaler: The scaler that the file holds, None where there is none (or it was disabled when saved).
        run_scaler: The scaler with which the replay goes on; None where it has none or a disabled one.
        scalers: Both beside the run's scaler before anything was loaded; None where one of them is not there.
        scaler_continued: False where the file holds a scaler and the run goes on with another scale, or is an fp16 run
            that has none. A run without a scaler in another precision, or whose scaler the replay's precision switches
            off, loses nothing.
    """

    loaded: tuple[str, ...] = ()
    tensors: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    global_step: int | None = None
    file_scaler: ScalerState | None = None
    run_scaler: ScalerState | None = None
    scalers: ResumedScaler | None = None
    scaler_continued: bool = True

    @property
    def settled_scale_lost(self) -> bool:
        """The file's scaler had settled (clean steps since its last change), and the run starts from another scale.

        A dead scale is none to go on with, however many steps it was kept for.
        """
        file = self.file_scaler
        return not self.scaler_continued and file is not None and file.growth_tracker > 0 and not file.dead


def resume(
    run: TrainingRun,
    optimizers: Mapping[str, Optimizer],
    scaler: torch.amp.GradScaler | None,
    state: CheckpointState,
    *,
    allow_partial: bool = False,
) -> ResumeReport:
    """Put `state` into the run's model, `optimizers` and `scaler`, all of it before step 0.

    A scaler that the user handed over themselves (an object or a callable) is theirs: whether their resumed run
    continues the file's scale is just what is to be diagnosed, so it is kept and compared. A scaler given as arguments
    gets the file's state.

    Args:
        run: The run; its `load` hook, where it has one, does everything instead and finds the built optimizers and
            scaler in `run.optimizer` and `run.scaler`.
        optimizers: The run's built optimizers by name.
        scaler: The run's built scaler.
        state: What the checkpoint holds.
        allow_partial: Load what fits and report the rest, instead of refusing.

    Raises:
        CheckpointError: No weights are there, keys are missing, unexpected or wrongly shaped, or an optimizer's or
            scaler's state does not fit; nothing is loaded then.
    """
    file_scaler = read_scaler_state(state.scaler)
    own_scaler = scaler_state_of(scaler)
    if run.load is not None:
        _run_hook(run, optimizers, scaler, state)
        return _report(run, ("hook",), scaler, file_scaler, state, own_scaler=own_scaler)
    weights = plan_weights(run.model, state.model, allow_partial=allow_partial)
    if not weights.tensors and not allow_partial and run.model.state_dict(keep_vars=True):
        raise CheckpointError(_no_weights(state))
    plans = plan_optimizers(run.model, optimizers, state.optimizers, allow_partial=allow_partial)
    loaded = [name for name, holds in (("weights", weights.tensors > 0), ("optimizer", plans.loads)) if holds]
    scaling = None
    if file_scaler is not None and isinstance(run.scaler, Mapping) and scaler is not None and scaler.is_enabled():
        scaling = _torch_state(file_scaler, state.scaler or {}, scaler)
    weights.load()
    plans.load()
    if scaler is not None and scaling is not None:
        scaler.load_state_dict(scaling)
        loaded.append("scaler")
    lacks = [
        name
        for name, has, wants in (
            ("weights", bool(state.model), True),
            ("optimizer", bool(state.optimizers), bool(optimizers)),
            ("scaler", file_scaler is not None, scaler is not None and scaler.is_enabled()),
        )
        if wants and not has
    ]
    return _report(
        run,
        tuple(loaded),
        scaler,
        file_scaler,
        state,
        own_scaler=own_scaler,
        tensors=weights.tensors,
        missing=weights.missing,
        unexpected=weights.unexpected,
        mismatched=weights.mismatched,
        lacks=tuple(lacks),
        notes=(*weights.notes, *plans.notes),
    )


def _no_weights(state: CheckpointState) -> str:
    parts = (("optimizer state", state.optimizers), ("a loss scaler", state.scaler))
    held = " and ".join(name for name, part in parts if part)
    found = f"only {held}" if held else "nothing that is recognised"
    return (
        f"the checkpoint holds no weights of the model, {found}: a replay would start from the factory's own weights; "
        "--allow-partial accepts that"
    )


def _run_hook(
    run: TrainingRun, optimizers: Mapping[str, Optimizer], scaler: torch.amp.GradScaler | None, state: CheckpointState
) -> None:
    assert run.load is not None  # noqa: S101 for the type checker: the caller has looked
    given = run.optimizer, run.scaler
    run.optimizer = next(iter(optimizers.values())) if len(optimizers) == 1 else dict(optimizers) or None
    run.scaler = scaler
    try:
        with user_code(what="the run's load hook"):
            run.load(run, state)
    finally:
        run.optimizer, run.scaler = given


def _report(
    run: TrainingRun,
    loaded: tuple[str, ...],
    scaler: torch.amp.GradScaler | None,
    file_scaler: ScalerState | None,
    state: CheckpointState,
    *,
    own_scaler: ScalerState | None,
    **parts: Any,
) -> ResumeReport:
    run_scaler = scaler_state_of(scaler)
    if file_scaler is None:
        continued = True
    elif run_scaler is None:
        continued = run.scaler is not None or run.precision != "fp16"
    else:
        continued = _same_scale(run_scaler.scale, file_scaler.scale)
    return ResumeReport(
        loaded=loaded,
        global_step=state.global_step,
        file_scaler=file_scaler,
        run_scaler=run_scaler,
        scalers=_beside(own_scaler, file_scaler, run_scaler, run, state),
        scaler_continued=continued,
        **parts,
    )


def _beside(
    own: ScalerState | None,
    file: ScalerState | None,
    now: ScalerState | None,
    run: TrainingRun,
    state: CheckpointState,
) -> ResumedScaler | None:
    """The three scalers, where there are three and the file's holds all settings (Apex's has the scale alone)."""
    if own is None or file is None or now is None or not (state.scaler or {}).keys() >= _SETTINGS:
        return None
    asked = frozenset(map(str, run.scaler)) if isinstance(run.scaler, Mapping) else None
    return ResumedScaler(own=own, file=file, now=now, asked=asked)


def _same_scale(first: float, second: float) -> bool:
    return first == second or (first != first and second != second)  # noqa: PLR0124 two NaNs are one broken scale


def scaler_state_of(scaler: torch.amp.GradScaler | None) -> ScalerState | None:
    """A live scaler's state; None where there is none, a disabled one, or one that is not torch's.

    Raises:
        CheckpointError: It holds something else than numbers.
    """
    torchs = isinstance(scaler, torch.amp.GradScaler)
    return read_scaler_state(scaler.state_dict(), key="run") if scaler is not None and torchs else None


def read_scaler_state(state: Mapping[str, Any] | None, *, key: str = "scaler") -> ScalerState | None:
    """A scaler's state dict (torch's or Apex's) as numbers; None for None and for the empty one of a disabled scaler.

    Raises:
        CheckpointError: Keys are absent, or hold no numbers. A scale of 0 or NaN is read as it is: it is a finding.
    """
    if not state:
        return None
    plain = {name: value.item() if _is_number(value) else value for name, value in state.items()}
    try:
        read = scaler_state(plain, key, "")
    except KeyError as error:
        raise CheckpointError(f"the checkpoint's scaler state has no {error.args[0]}") from error
    if read is None:
        raise CheckpointError("the checkpoint's scaler state holds something else than numbers")
    return read


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _torch_state(state: ScalerState, saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """What `scaler.load_state_dict` takes; settings that the file does not hold (Apex's has two) stay the run's.

    Raises:
        CheckpointError: torch's scaler, which holds its scale as float32 and its counter as int32, cannot hold it. A
            scale that is infinite or NaN can be held: it is a finding.
    """
    if math.isfinite(state.scale) and abs(state.scale) > torch.finfo(torch.float32).max:
        raise CheckpointError(f"the checkpoint's loss scale is {state.scale:g}, which no float32 holds")
    if abs(state.growth_tracker) > torch.iinfo(torch.int32).max:
        raise CheckpointError(
            f"the checkpoint's scaler counts {state.growth_tracker} clean steps, which no int32 holds"
        )
    read = {
        "growth_factor": state.growth_factor,
        "backoff_factor": state.backoff_factor,
        "growth_interval": state.growth_interval,
    }
    held = {name: value for name, value in read.items() if name in saved}
    return {**scaler.state_dict(), **held, "scale": state.scale, "_growth_tracker": state.growth_tracker}
