"""Replaces, before step 0, settings of a GradScaler that its constructor takes and its first use refuses.

A float interval, for example, raises in the first `update()`. A replay that failed there could report nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ampdoctor.evidence.of_runs.scaler_settings import RefusedSetting

_FACTORS = {"growth_factor": 2.0, "backoff_factor": 0.5}
_INTERVAL = 2000
_SCALE = 65536.0
"""GradScaler's own defaults."""


def make_usable(scaler: Any) -> tuple[RefusedSetting, ...]:
    """Replace the settings that torch refuses, in place; the others become plain numbers with their value.

    A whole number that is written as a float becomes an int; any other refused setting becomes GradScaler's default.

    Args:
        scaler: The run's scaler; if it is disabled, or not torch's, it is left alone.
    """
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return ()
    refused = []
    for name, accepts in _ACCEPTS.items():
        attribute = f"_{name}"
        given = getattr(scaler, attribute)
        if name == "init_scale" and scaler._scale is not None:  # noqa: SLF001 its tensor exists: it was accepted
            continue
        try:
            accepts(given)
            setattr(scaler, attribute, _plain(given, name))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            used = _instead(given, name)
            setattr(scaler, attribute, used)
            first = str(error).strip().partition("\n")[0]
            raised = f"{type(error).__name__}: {first}"
            refused.append(RefusedSetting(name=name, given=_shown(given), used=used, raised=raised))
    return tuple(refused)


def _takes_scale(value: Any) -> None:
    torch.full((), value, dtype=torch.float32)  # as GradScaler makes its scale


def _takes(name: str) -> Callable[[Any], None]:
    def update(value: Any) -> None:
        settings: Mapping[str, Any] = {**_FACTORS, "growth_interval": _INTERVAL, name: value}
        scale, overflows = torch.ones((), dtype=torch.float32), torch.zeros((), dtype=torch.float32)
        clean_steps = torch.zeros((), dtype=torch.int32)
        torch._amp_update_scale_(scale, clean_steps, overflows, *settings.values())  # what GradScaler.update calls

    return update


_ACCEPTS: Mapping[str, Callable[[Any], None]] = {
    "init_scale": _takes_scale,
    **{name: _takes(name) for name in (*_FACTORS, "growth_interval")},
}


def _plain(value: Any, name: str) -> float:
    return int(value) if name == "growth_interval" else float(value)


def _instead(value: Any, name: str) -> float:
    if name == "growth_interval":
        whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value) and abs(value) < 2**31
        return int(value) if whole and not isinstance(value, bool) else _INTERVAL
    return _SCALE if name == "init_scale" else _FACTORS[name]


def _shown(value: Any) -> str:
    return repr(value)[:80]
