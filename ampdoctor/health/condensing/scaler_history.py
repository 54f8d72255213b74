"""What a run's steps say of its loss scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.evidence.report_health import ScalerHistory
from ampdoctor.evidence.report_scaler import ScalePath, ScalerArguments
from ampdoctor.health.condensing.columns import Column

_MOST = 2000
"""Points of a path, and skipped steps, that are kept: as `ScalePath` says."""

_READ = ("step", "loss_scale", "skipped", "growth_tracker")


def scaler_histories(
    columns: Mapping[str, Column], names: Sequence[str], state: Mapping[str, Any] | None
) -> tuple[ScalerHistory, ...]:
    """Returns the history of each scaler that the steps of an optimizer name.

    Args:
        columns: In the order of the steps.
        names: Of the scalers, by their index.
        state: Of the first scaler when the run began.
    """
    known = np.isfinite(columns["loss_scale"])
    if not known.any() or np.all(columns["loss_scale"][known] == 1):  # a scaler that is switched off
        return ()
    scalers = np.where(np.isnan(columns["scaler"]), 0, columns["scaler"])
    found = sorted({int(one) for one in np.unique(scalers[known])})
    return tuple(
        _history(
            {
                name: columns[name][known & (scalers == at)]
                for name in ("step", "loss_scale", "skipped", "growth_tracker")
            },
            (names[at] if at < len(names) else str(at)) if len(found) > 1 else "",
            arguments_in(state) if at == 0 else None,
        )
        for at in found
    )


def arguments_in(state: Mapping[str, Any] | None) -> ScalerArguments | None:
    """Returns the settings in a scaler's `state_dict()`; None where it has them not."""
    if state is None:
        return None
    try:
        return ScalerArguments(
            init_scale=float(state["scale"]),
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=max(int(state["growth_interval"]), 1),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _history(columns: Mapping[str, Column], name: str, arguments: ScalerArguments | None) -> ScalerHistory:
    steps, scales = columns["step"], columns["loss_scale"]
    moves = np.diff(scales)
    starts = np.append(0, np.flatnonzero(moves) + 1)
    skips = steps[columns["skipped"] == 1]
    tracker = columns["growth_tracker"][np.isfinite(columns["growth_tracker"])]
    drawn = starts if len(starts) <= _MOST else _extremes(starts, scales)
    shown = skips if len(skips) <= _MOST else skips[np.linspace(0, len(skips) - 1, _MOST).astype(np.intp)]
    return ScalerHistory(
        scaler=name,
        path=ScalePath(
            points=tuple((float(steps[at]), float(scales[at])) for at in drawn),
            changes=len(starts),
            skips=tuple(shown.astype(np.int64).tolist()),
            skipped=len(skips),
            replica=0,
        ),
        growths=int(((moves > 0) & (columns["skipped"][:-1] != 1)).sum()),  # behind a skipped step, a scaler is new
        backoffs=int((moves < 0).sum()),
        growth_tracker=int(tracker[-1]) if len(tracker) else None,
        arguments=arguments,
    )


def _extremes(starts: NDArray[np.intp], scales: Column) -> list[int]:
    """Returns the points with the lowest and the highest scale in each of half as many equal spans, in order."""
    span = starts * (_MOST // 2) // len(scales)
    kept: set[int] = {0}
    for members in np.split(np.arange(len(starts)), np.flatnonzero(np.diff(span)) + 1):
        of = scales[starts[members]]
        kept |= {int(members[np.argmin(of)]), int(members[np.argmax(of)])}
    return [int(starts[at]) for at in sorted(kept)]
