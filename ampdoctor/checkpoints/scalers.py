"""Loss scalers as the frameworks save them: torch's GradScaler, Apex's amp, DeepSpeed's objects, Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.checkpoints.pickled_objects import fields_of
from ampdoctor.checkpoints.stored_tensor import StoredTensor
from ampdoctor.checkpoints.unpickler import PickledObject
from ampdoctor.evidence.checkpoint_stats import ScalerState

_TORCH_KEYS = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
_APEX_KEYS = frozenset({"loss_scale", "unskipped"})
_DEEPSPEED_KEYS = frozenset({"cur_scale", "cur_iter"})
_DEEPSPEED_STATIC_KEYS = frozenset({"cur_scale", "dynamic"})
_MEGATRON_KEYS = frozenset({"scale", "growth_tracker", "hysteresis_tracker"})
_TORCH_OBJECT = {
    "scale": "_init_scale",
    "growth_factor": "_growth_factor",
    "backoff_factor": "_backoff_factor",
    "growth_interval": "_growth_interval",
    "_growth_tracker": "_init_growth_tracker",
}
"""Entries of GradScaler's state dict, with the attributes in which `__getstate__` leaves them in a pickled scaler."""
_DEEPSPEED_SETTINGS = frozenset({"last_overflow_iter", "scale_window", "scale_factor", "min_scale"})
_FORMS = (_TORCH_KEYS, _APEX_KEYS, _DEEPSPEED_KEYS, _DEEPSPEED_STATIC_KEYS, _MEGATRON_KEYS)

MEGATRON_DEFAULTS: Mapping[str, Any] = {"loss_scale_window": 1000, "min_loss_scale": 1.0}
"""Megatron keeps its scaler's settings among its arguments (megatron/training/arguments.py), not in its state."""

_OWN_KEYS = frozenset[str]().union(*_FORMS, _DEEPSPEED_SETTINGS, MEGATRON_DEFAULTS, _TORCH_OBJECT.values())


def is_own_field(key: Any, value: Any) -> bool:
    """Whether an entry beside a scaler's is one of its numbers, rather than something else in the same dict."""
    return isinstance(key, str) and key in _OWN_KEYS and isinstance(value, StoredTensor) and value.numel == 1


def scaler_fields(node: Any) -> Mapping[str, Any] | None:
    """Returns what a loss scaler saved, {} for DeepSpeed's where nothing is scaled; None for anything else."""
    fields = fields_of(node) if isinstance(node, PickledObject) else node
    if isinstance(fields, Mapping) and fields.keys() >= set(_TORCH_OBJECT.values()):
        whole = {entry: fields[attribute] for entry, attribute in _TORCH_OBJECT.items()}
        return whole if fields.get("_enabled", True) else {}
    if not isinstance(fields, Mapping) or not any(fields.keys() >= form for form in _FORMS):
        return None
    if fields.keys() >= _DEEPSPEED_STATIC_KEYS and not fields["dynamic"] and number(fields["cur_scale"]) == 1:
        return {}
    return fields


def scaler_state(saved: Mapping[str, Any], key: str, file: str) -> ScalerState | None:
    """Returns a saved scaler as numbers; None if one of its values is not a number."""
    if saved.keys() >= _APEX_KEYS:
        return _state(saved, key, file, scale="loss_scale", tracker="unskipped")
    if "cur_scale" in saved:
        return _deepspeed(saved, key, file)
    if saved.keys() >= _MEGATRON_KEYS:
        # the counter restarts when it reaches the window, so an unknown window is larger than the counter
        default = MEGATRON_DEFAULTS["loss_scale_window"]
        window = max(default, _count(number(saved["growth_tracker"])) + 1)
        settings = {**MEGATRON_DEFAULTS, "loss_scale_window": window, **saved}
        return _state(
            settings, key, file, scale="scale", tracker="growth_tracker", interval="loss_scale_window",
            floor="min_loss_scale",
        )  # fmt: skip
    return _state(
        saved, key, file, scale="scale", growth="growth_factor", backoff="backoff_factor", interval="growth_interval",
        tracker="_growth_tracker",
    )  # fmt: skip


def not_numbers(saved: Mapping[str, Any]) -> str:
    """Lists the values for which `scaler_state` returns None: "scale"."""
    numbers = _OWN_KEYS - {"dynamic"}  # DeepSpeed's flag
    return ", ".join(key for key, value in saved.items() if key in numbers and number(value) is None)


def number(value: Any) -> float | None:
    """Returns a Python number or a one-element stored tensor as a float; None for anything else."""
    if isinstance(value, StoredTensor):
        return float(value.load().double().item()) if value.numel == 1 and not value.dtype.is_complex else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < 2.0**1023 or isinstance(value, float) else None
    return None


def _state(saved: Mapping[str, Any], key: str, file: str, **entries: str) -> ScalerState | None:
    values = {role: number(saved[entry]) for role, entry in entries.items()}
    if any(v is None for v in values.values()):
        return None
    default = ScalerState(scale=0.0)
    return ScalerState(
        scale=values["scale"] or 0.0,
        growth_factor=values.get("growth", default.growth_factor) or 0.0,
        backoff_factor=values.get("backoff", default.backoff_factor) or 0.0,
        growth_interval=_count(values.get("interval", default.growth_interval)),
        growth_tracker=_count(values["tracker"]),
        min_scale=values.get("floor"),
        key=key,
        file=file,
    )


def _deepspeed(saved: Mapping[str, Any], key: str, file: str) -> ScalerState | None:
    """Returns DeepSpeed's scaler (runtime/fp16/loss_scaler.py), whose counters are iterations.

    It grows if `cur_iter - last_overflow_iter - 1` is a positive multiple of the window.
    """
    scale, now = number(saved["cur_scale"]), number(saved.get("cur_iter"))
    last, window = number(saved.get("last_overflow_iter")), number(saved.get("scale_window"))
    factor = number(saved.get("scale_factor"))
    if scale is None:
        return None
    if now is None or last is None or window is None or factor is None:
        return ScalerState(scale=scale, growth_factor=1.0, backoff_factor=1.0, key=key, file=file)
    clean = max(_count(now) - _count(last) - 2, 0)
    interval = _count(window)
    return ScalerState(
        scale=scale,
        growth_factor=factor,
        backoff_factor=1 / factor if factor else 0.0,
        growth_interval=interval,
        growth_tracker=clean % interval if interval > 0 else clean,
        min_scale=number(saved.get("min_scale")),
        key=key,
        file=file,
    )


def _count(value: float | None) -> int:
    """Returns a counter that was saved as any number; a value that is not finite counts as 0."""
    return int(value) if value is not None and abs(value) < 2.0**63 else 0
