"""Loads a checkpoint into a run before step 0: weights, optimizer, scaler, schedulers and random numbers.

All checks come before the first load, so that a refusal leaves the run as the factory made it.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.checkpoints.scalers import not_numbers, scaler_state
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.run_facts import ResumedScaler
from ampdoctor.replay.fit_checkpoint import plan_optimizers, plan_weights
from ampdoctor.replay.snapshot import ScalerSnapshot, is_one_element
from ampdoctor.replay.user_code import user_code

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ampdoctor.checkpoints.resume_state import LoadedCheckpoint, RandomNumbers
    from ampdoctor.evidence.checkpoint_stats import ScalerState
    from ampdoctor.replay.training_run import TrainingRun


_SETTINGS = {"growth_factor", "backoff_factor", "growth_interval"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """Which parts of a checkpoint were loaded into the run, and which were not.

    `missing`, `unexpected` and `mismatched` are empty unless partial loading was allowed. `scaler_continued` is False
    if the file has a scaler and the run continues with another scale that the user did not ask for, or is an fp16 run
    without a scaler. It stays True for other precisions without a scaler, and if the replay's precision needs none.
    """

    loaded: tuple[str, ...] = ()  # of "weights", "optimizer", "scaler"; ("hook",) if `run.load` did everything
    tensors: int = 0  # number of the model's tensors that were loaded
    missing: tuple[str, ...] = ()  # names in the model only
    unexpected: tuple[str, ...] = ()  # keys in the file only
    mismatched: tuple[str, ...] = ()  # names with different shapes
    lacks: tuple[str, ...] = ()  # in the run but not in the file: "weights", "optimizer", "scaler"
    notes: tuple[str, ...] = ()  # sentences on changed values or settings
    global_step: int | None = None  # the checkpoint's training step, if it has one
    file_scaler: ScalerState | None = None  # None if there is none or it was disabled
    scalers: ResumedScaler | None = None  # the two, and the run's own before loading; None unless all three exist
    scaler_continued: bool = True

    @property
    def collapsed_from(self) -> float | None:
        """The initial scale of the factory's scaler, if the run continues with a collapsed one; else None."""
        if self.scalers is None or not self.scalers.now.collapsed:
            return None
        return self.scalers.own.scale if self.scalers.own.scale >= 1 else None

    @property
    def lost_scaler(self) -> ScalerState | None:
        """The file's scaler if it had settled or collapsed, is not dead, and the run uses another scale; else None."""
        file = self.file_scaler
        if self.scaler_continued or file is None or file.dead:
            return None
        return file if file.growth_tracker > 0 or file.collapsed else None


def resume(
    run: TrainingRun,
    optimizers: Mapping[str, Optimizer],
    scaler: torch.amp.GradScaler | None,
    state: LoadedCheckpoint,
    *,
    allow_partial: bool = False,
    fresh_scaler: bool = False,
) -> ResumeReport:
    """Load `state` into the run's model, `optimizers` and `scaler`.

    A scaler that the user passed as an object or a callable is kept and compared: whether the user's resumed run
    continues the file's scale is part of the diagnosis. A scaler given as arguments gets the file's state. The run's
    `load` hook, if there is one, does all the loading and finds optimizers and scaler in `run`.

    With `allow_partial` parts that fit are loaded and the rest is reported. With `fresh_scaler` the scaler stays as the
    factory made it, even if the hook loads a state into it. Raises CheckpointError, with nothing loaded, if weights are
    absent or a part does not fit.
    """
    own_scaler = scaler_state_of(scaler)
    notes: tuple[str, ...] = ()
    file_scaler = None
    try:
        file_scaler = read_scaler_state(state.scaler)
    except CheckpointError as error:
        if not fresh_scaler:
            raise CheckpointError(f"{error}; bisect-nan --fresh-scaler goes on without it") from error
        notes = (f"{error}, and is not loaded (--fresh-scaler)",)
    if fresh_scaler and file_scaler is not None:
        without = ": the run has no scaler" if run.scaler is None else ""  # it may be off, or another library's
        starts = without if own_scaler is None else f": the replay starts at {own_scaler.scale:g}"
        notes = (f"the checkpoint's loss scale of {file_scaler.scale:g} is not loaded (--fresh-scaler){starts}",)
    report = partial(_report, run, scaler, file_scaler, state, own_scaler=own_scaler, fresh=fresh_scaler)
    if run.load is not None:
        made = ScalerSnapshot.of(scaler) if fresh_scaler and scaler is not None else None
        _run_hook(run, optimizers, scaler, state)
        if made is not None:
            made.restore(scaler)
        return report(("hook",), notes=notes)
    weights = plan_weights(run.model, state.model, allow_partial=allow_partial)
    if not weights.tensors and not allow_partial and run.model.state_dict(keep_vars=True):
        parts = (("optimizer state", state.optimizers), ("a loss scaler", state.scaler))
        held = " and ".join(name for name, part in parts if part)
        raise CheckpointError(
            f"the checkpoint holds no weights of the model, {f'only {held}' if held else 'nothing that is recognised'}"
            ": a replay would start from the factory's own weights; --allow-partial accepts that"
        )
    recorded = run.first_step is not None
    plans = plan_optimizers(run.model, optimizers, state.optimizers, allow_partial=allow_partial, own_settings=recorded)
    loaded = [name for name, holds in (("weights", weights.tensors > 0), ("optimizer", plans.loads)) if holds]
    scaling = None
    given = isinstance(run.scaler, Mapping) and scaler is not None and scaler.is_enabled() and not fresh_scaler
    if file_scaler is not None and scaler is not None and given:
        scaling = _torch_state(file_scaler, state.scaler or {}, scaler)
    weights.load()
    plans.load()
    if scaler is not None and scaling is not None:
        scaler.load_state_dict(scaling)
        loaded.append("scaler")
    wanted = (
        ("weights", state.model, True),
        ("optimizer", state.optimizers, bool(optimizers)),
        ("scaler", state.scaler, scaler is not None and scaler.is_enabled()),
    )
    return report(
        tuple(loaded),
        tensors=weights.tensors,
        missing=weights.missing,
        unexpected=weights.unexpected,
        mismatched=weights.mismatched,
        lacks=tuple(name for name, held, wants in wanted if wants and not held),
        notes=(*weights.notes, *plans.notes, *notes),
    )


def _run_hook(
    run: TrainingRun, optimizers: Mapping[str, Optimizer], scaler: torch.amp.GradScaler | None, state: LoadedCheckpoint
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
    scaler: torch.amp.GradScaler | None,
    file_scaler: ScalerState | None,
    state: LoadedCheckpoint,
    loaded: tuple[str, ...],
    *,
    own_scaler: ScalerState | None,
    fresh: bool,
    **parts: Any,
) -> ResumeReport:
    run_scaler = scaler_state_of(scaler)
    if file_scaler is None or fresh:
        continued = True
    elif run_scaler is None:
        continued = run.scaler is not None or run.precision != "fp16"
    else:
        both_broken = math.isnan(run_scaler.scale) and math.isnan(file_scaler.scale)
        continued = run_scaler.scale == file_scaler.scale or both_broken
    return ResumeReport(
        loaded=loaded,
        global_step=state.global_step,
        file_scaler=file_scaler,
        scalers=None if fresh else _beside(own_scaler, file_scaler, run_scaler, run, state),
        scaler_continued=continued,
        **parts,
    )


def _beside(
    own: ScalerState | None,
    file: ScalerState | None,
    now: ScalerState | None,
    run: TrainingRun,
    state: LoadedCheckpoint,
) -> ResumedScaler | None:
    """Returns the three scalers; None if one is absent or the file's lacks settings (Apex's has only the scale)."""
    if own is None or file is None or now is None or not (state.scaler or {}).keys() >= _SETTINGS:
        return None
    asked = frozenset(map(str, run.scaler)) if isinstance(run.scaler, Mapping) else None
    return ResumedScaler(own=own, file=file, now=now, asked=asked)


def scaler_state_of(scaler: torch.amp.GradScaler | None) -> ScalerState | None:
    """Returns a live scaler's state; None if there is no scaler, it is disabled, or it is not torch's."""
    torchs = isinstance(scaler, torch.amp.GradScaler)
    return read_scaler_state(scaler.state_dict(), key="run") if scaler is not None and torchs else None


def read_scaler_state(state: Mapping[str, Any] | None, *, key: str = "scaler") -> ScalerState | None:
    """Reads a state dict of torch's or Apex's scaler; None for None and for a disabled scaler's empty one."""
    if not state:
        return None
    plain = {name: value.item() if is_one_element(value) else value for name, value in state.items()}
    try:
        read = scaler_state(plain, key, "")
    except KeyError as error:
        raise CheckpointError(f"the checkpoint's scaler state has no {error.args[0]}") from error
    if read is None:
        raise CheckpointError(
            f"the {'run' if key == 'run' else 'checkpoint'}'s scaler state holds something else than a number as "
            f"{not_numbers(plain)}"
        )
    return read


def _torch_state(state: ScalerState, saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Returns the argument of `scaler.load_state_dict`; settings that the file lacks (Apex's) stay the run's."""
    too_large = math.isfinite(state.scale) and abs(state.scale) > torch.finfo(torch.float32).max
    if too_large or abs(state.growth_tracker) > torch.iinfo(torch.int32).max:
        raise CheckpointError(
            f"the checkpoint's loss scale is {state.scale:g} after {state.growth_tracker} clean steps: "
            f"torch's scaler holds a float32 and an int32"
        )
    read = {
        "growth_factor": state.growth_factor,
        "backoff_factor": state.backoff_factor,
        "growth_interval": state.growth_interval,
    }
    held = {name: value for name, value in read.items() if name in saved}
    return {**scaler.state_dict(), **held, "scale": state.scale, "_growth_tracker": state.growth_tracker}


# -- learning-rate schedules --


def load_schedulers(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> str | None:
    """Load the saved schedules, in the order in which they were saved, into the run's schedulers: all or none."""
    able = [one for one in schedulers if callable(getattr(one, "load_state_dict", None))]
    if not able:
        return None
    if not saved:
        return "holds no schedule of the learning rate: it is as the factory makes it"
    if len(saved) != len(able):
        return f"holds {len(saved)} schedules of the learning rate, and the run has {len(able)}: none was loaded"
    before = [copy.copy(vars(one)) for one in able]
    for one, state in zip(able, saved, strict=True):
        try:
            one.load_state_dict(copy.deepcopy(dict(state)))
        except Exception as error:  # noqa: BLE001 - a class of the user's, or of another torch's
            for other, values in zip(able, before, strict=True):
                vars(other).clear()
                vars(other).update(values)
            return f"holds a schedule that {type(one).__name__} does not load ({type(error).__name__}: {error})"
    return None


# -- random generators --


def set_generators(saved: RandomNumbers) -> None:
    """Set the generators whose states were saved."""
    import numpy as np

    if saved.torch is not None:
        torch.set_rng_state(saved.torch)
    if saved.python is not None:
        random.setstate(saved.python)
    if saved.numpy is not None:
        np.random.set_state(saved.numpy)  # noqa: NPY002 - the global one is what user code draws from


def not_restored(saved: RandomNumbers, device: str) -> Iterator[str]:
    """Yields clauses on random numbers (dropout, augmentation) that differ from the training's."""
    if saved.torch is None:
        yield "the file holds no random state of torch: random numbers (dropout) are others than the training's"
    if saved.of_devices and device == "cpu":
        yield "random numbers that the training drew on its GPU (dropout) are others here: a CPU draws its own"
