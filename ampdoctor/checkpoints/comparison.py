"""Compares a checkpoint with an earlier one: which tensors are in both, and how they changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ampdoctor.checkpoints.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.optimizer_state import StoredState, reach, states_of
from ampdoctor.checkpoints.scalers import number
from ampdoctor.checkpoints.series import moment_of
from ampdoctor.checkpoints.stored_tensor import StoredTensor, dtype_name, side_by_side, widened
from ampdoctor.checkpoints.tensor_statistics import Observer
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, CheckpointSummary, TensorChange, TensorRole
from ampdoctor.evidence.report import Skipped

_COMPARED: frozenset[TensorRole] = frozenset({"weight", "buffer", "ema"})
_HALF = frozenset({torch.float16, torch.bfloat16})
LOOKED_INTO = 0.75
"""Share of unchanged elements from which a weight's updates are examined; AMP712 needs at least as much."""
HORIZON = 1000
"""Number of steps in which a learning rate should move a weight, unless a schedule has lowered it."""
TAKEN_DOWN = 0.1
"""Below this share of the initial learning rate, a schedule counts as warming up or ending."""


class _Key(NamedTuple):
    role: TensorRole
    group: str
    name: str
    entry: str
    occurrence: int


@dataclass(frozen=True, slots=True)
class _Moments:
    refs: Mapping[str, list[TensorRef]]
    states: Mapping[int, StoredState]
    alive: frozenset[str]
    rates: Mapping[str, tuple[float, bool]]


def measure_change(
    new: Checkpoint, summary: CheckpointSummary, old: Checkpoint, progress: Observer | None = None
) -> tuple[CheckpointChange, tuple[Skipped, ...]]:
    """Compare the floating-point tensors of two checkpoints; returns the change, and what could not be compared.

    `summary` is the newer one's; its optimizer state is compared where it is not finite.
    """
    sick = {(t.role, t.group, t.name, t.entry) for t in summary.tensors if t.nonfinite}
    newer, older = _by_key(new), _by_key(old)
    both = [key for key in newer if key in older and (key.role in _COMPARED or key[:4] in sick)]
    shaped = [key for key in both if newer[key].shape == older[key].shape]
    old_step, new_step = _steps(old, new)
    moments = _moments(new, summary, old)
    changes: list[TensorChange] = []
    skipped: list[Skipped] = []
    done, total = 0, sum(newer[key].nbytes + older[key].nbytes for key in shaped)
    for key in shaped:
        ref, before = newer[key], older[key]
        if progress is not None:
            progress(f"comparing {ref.name}", done, total)
        done += ref.nbytes + before.nbytes
        if ref.dtype.is_complex != before.dtype.is_complex:
            reason = f"not compared: {dtype_name(before.dtype)} became {dtype_name(ref.dtype)}"
            skipped.append(Skipped(what=key.name, reason=reason))
            continue
        try:
            change = _change(ref, before)
        except LimitExceededError as error:
            skipped.append(Skipped(what=ref.name, reason=f"not compared: {error}"))
            continue
        if key.role == "weight" and not key.group:
            change = _with_moments(change, ref, moments, (new_step or 0) - (old_step or 0))
        changes.append(change)
    new.require_unchanged()
    old.require_unchanged()
    if progress is not None:
        progress("compared", total, total)
    return (
        CheckpointChange(
            old=old.path,
            new=new.path,
            old_step=old_step,
            new_step=new_step,
            tensors=tuple(changes),
            appeared=_only(newer, older),
            vanished=_only(older, newer),
            reshaped={
                _address(newer[key]): (older[key].shape, newer[key].shape)
                for key in both
                if newer[key].shape != older[key].shape
            },
            old_scale=old.scalers[0].scale if old.scalers else None,
            new_scale=new.scalers[0].scale if new.scalers else None,
        ),
        tuple(skipped),
    )


def _by_key(checkpoint: Checkpoint) -> dict[_Key, TensorRef]:
    found: dict[_Key, TensorRef] = {}
    often: Counter[tuple[TensorRole, str, str, str]] = Counter()
    for ref in checkpoint:
        if ref.dtype.is_floating_point or ref.dtype.is_complex:
            told = (ref.role, ref.group, ref.name, ref.entry)
            found[_Key(*told, often[told])] = ref  # repeated: models in separate files
            often[told] += 1
    return found


def _only(these: Mapping[_Key, TensorRef], others: Mapping[_Key, TensorRef]) -> tuple[str, ...]:
    return tuple(_address(ref) for key, ref in these.items() if key.role in _COMPARED and key not in others)


def _address(ref: TensorRef) -> str:
    return f"{ref.group}.{ref.name}" if ref.group else ref.name


def _steps(old: Checkpoint, new: Checkpoint) -> tuple[int | None, int | None]:
    """Returns both steps as stored; if one is not stored, both as in the names."""
    stored = old.global_step, new.global_step
    if None not in stored:
        return stored
    named = [moment_of(checkpoint.path, folder=False) for checkpoint in (old, new)]
    if any(moment is None or moment.unit in {"epoch", "unsure"} for moment in named):
        return stored
    before, after = (moment.number if moment is not None else None for moment in named)
    return before, after


def _change(new: TensorRef, old: TensorRef) -> TensorChange:
    found = difference(new.stored, old.stored)
    return TensorChange(
        name=new.name,
        role=new.role,
        entry=new.entry,
        module=new.module,
        group=new.group,
        file=new.file,
        shape=new.shape,
        dtype=dtype_name(new.dtype),
        old_dtype=dtype_name(old.dtype),
        elements=found.elements,
        unchanged=found.unchanged,
        change_norm=math.sqrt(found.squared_change),
        old_norm=math.sqrt(found.squared_old),
        amax=found.amax or None,
        old_amax=found.old_amax or None,
        nonfinite=found.nonfinite,
        old_nonfinite=found.old_nonfinite,
    )


def _moments(new: Checkpoint, summary: CheckpointSummary, old: Checkpoint) -> _Moments:
    refs: dict[str, list[TensorRef]] = {}
    for ref in new:
        if ref.role == "moment":
            refs.setdefault(ref.name, []).append(ref)
    alive = frozenset(t.name for t in summary.tensors if t.role == "moment" and (t.amax is not None or t.nonfinite))
    states = states_of(new)
    rates = _rates([(old, states_of(old)), (new, states)])
    for weight, numbered in _of_one_shape(new, refs):
        refs[weight] = refs[numbered]
        alive |= {weight} if numbered in alive else set()
        rates |= {weight: rates[numbered]} if numbered in rates else {}
    return _Moments(refs, states, alive, rates)


def _of_one_shape(new: Checkpoint, refs: Mapping[str, list[TensorRef]]) -> list[tuple[str, str]]:
    """Returns weights without known moments, each with numbered ones of its shape, which have similar magnitudes."""
    weights: dict[tuple[int, ...], list[str]] = {}
    for ref in new:
        if ref.role == "weight" and not ref.group and ref.name not in refs:
            weights.setdefault(ref.shape, []).append(ref.name)
    named = {ref.name for ref in new if ref.role == "weight"}
    numbered: dict[tuple[int, ...], list[str]] = {}
    for name, moments in refs.items():
        if name not in named:
            numbered.setdefault(max((ref.shape for ref in moments), key=math.prod), []).append(name)
    return [
        pair
        for shape, names in weights.items()
        if len(names) == len(numbered.get(shape, ()))
        for pair in zip(names, numbered[shape], strict=True)
    ]


def _rates(checkpoints: list[tuple[Checkpoint, dict[int, StoredState]]]) -> dict[str, tuple[float, bool]]:
    """Returns the larger learning rate of each parameter, and whether a schedule has lowered it, as to 0 at its end."""
    found: dict[str, tuple[float, bool]] = {}
    for checkpoint, states in checkpoints:
        for ref in checkpoint:
            stored = states.get(id(ref.stored)) if ref.role == "moment" else None
            rate = stored.learning_rate if stored is not None else None
            if rate is not None and stored is not None:
                initial = number(stored.group.get("initial_lr"))
                low = initial is not None and rate < TAKEN_DOWN * initial
                found[ref.name] = max(found.get(ref.name, (0.0, low)), (rate, low))
    return found


def _with_moments(change: TensorChange, ref: TensorRef, known: _Moments, steps: int) -> TensorChange:
    refs = [r for r in known.refs.get(ref.name, ()) if r.dtype.is_floating_point]
    if not refs:
        return change
    change = replace(
        change,
        moments=ref.name in known.alive,
        pure_half=ref.dtype in _HALF and all(r.dtype == ref.dtype for r in refs),
    )
    rate = known.rates.get(ref.name)
    state = next((known.states[id(r.stored)] for r in refs if id(r.stored) in known.states), None)
    worth = steps > 0 and change.unchanged >= LOOKED_INTO * change.elements and not change.nonfinite
    if rate is None or state is None or not worth:
        return change
    learning_rate, low = rate
    return replace(change, reach=reach(ref.stored, state, learning_rate, steps if low else max(steps, HORIZON)))


# -- two stored tensors of one shape --


@dataclass(slots=True)
class Difference:
    """The comparison of a newer and an older tensor's elements."""

    elements: int = 0  # pairs
    unchanged: int = 0  # pairs of equal values; NaN equals NaN
    squared_change: float = 0.0  # sum of (new - old)^2 over pairs of finite values
    squared_old: float = 0.0  # sum of old^2 over the same pairs
    amax: float = 0.0  # largest finite magnitude
    old_amax: float = 0.0
    nonfinite: int = 0  # NaNs and infinities
    old_nonfinite: int = 0


def difference(new: StoredTensor, old: StoredTensor) -> Difference:
    """Compare two tensors of one shape, widened exactly; raises LimitExceededError as `side_by_side`."""
    found = Difference()
    for newer, older in side_by_side(new, old):
        _add(found, newer, older)
    return found


def _add(found: Difference, new: torch.Tensor, old: torch.Tensor) -> None:
    newer, older = widened(new).to(torch.float64), widened(old).to(torch.float64)
    finite, was_finite = newer.isfinite(), older.isfinite()
    both = finite & was_finite
    unchanged = (newer == older) | (newer.isnan() & older.isnan())
    moved, before = (newer - older)[both], older[both]
    found.elements += newer.numel()
    found.unchanged += int(torch.count_nonzero(unchanged))
    found.squared_change += float(torch.dot(moved, moved))
    found.squared_old += float(torch.dot(before, before))
    found.amax = max(found.amax, _amax(newer[finite]))
    found.old_amax = max(found.old_amax, _amax(older[was_finite]))
    found.nonfinite += newer.numel() - int(torch.count_nonzero(finite))
    found.old_nonfinite += older.numel() - int(torch.count_nonzero(was_finite))


def _amax(values: torch.Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0
