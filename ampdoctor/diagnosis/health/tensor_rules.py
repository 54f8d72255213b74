"""Rules on single tensors over a run; a look is one sampling of the tensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.catalogue import WATCHED, Rule, figure, rule
from ampdoctor.diagnosis.health.judge import TENSOR, ahead
from ampdoctor.diagnosis.health.tensor_state import (
    LEAST_BEFORE,
    NEW,
    TensorState,
    breaks,
    medians,
    moved_first,
    slope,
    weight_breaks,
)
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

if TYPE_CHECKING:
    import numpy as np
else:
    from ampdoctor.diagnosis.health.tensor_state import np

GRADIENT_DEPARTS = rule("AMP728", WATCHED)
FLOOR = 0.15  # least deviation of a rate, in e-folds a look: gradients of single batches vary as much


@GRADIENT_DEPARTS.judges(TensorState)
def _gradient_departs(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    rows = moment.rows("gradient")
    if not len(rows):
        return
    norms = moment.values("norm", rows)
    yield from _vanished(moment, rows, norms)
    found = breaks(norms, FLOOR)
    for grows, limit in ((False, thresholds[GRADIENT_DEPARTS["falls"]]), (True, thresholds[GRADIENT_DEPARTS["grows"]])):
        by = found.by if grows else -found.by
        hit = np.flatnonzero(by >= limit)
        if not len(hit):
            continue
        hit = hit[np.argsort(-by[hit], kind="stable")]
        worst = hit[0]
        before, now = float(norms[worst, -1 - NEW]), float(norms[worst, -1])
        yield GRADIENT_DEPARTS.finding(
            "warning",
            f"The gradient of {TENSOR} {'grows' if grows else 'falls away'}: its norm went from {before:.3g} to "
            f"{now:.3g} over the last {NEW} looks. That is {by[worst]:.0f} robust deviations "
            f"{'above' if grows else 'below'} its trend{f', as for {len(hit) - 1} more' if len(hit) > 1 else ''}.",
            where=moment.where(rows[worst], "backward"),
            also=tuple(moment.where(rows[i], "backward") for i in hit[1:]),
            evidence={
                "first": "gradient",
                "norm": now,
                "norm_before": before,
                "deviations": float(by[worst]),
                "tensors": len(hit),
            },
        )


def _vanished(moment: TensorState, rows: np.ndarray, norms: np.ndarray) -> Iterator[Finding]:
    """A gradient that is exactly zero in the last looks, for the first time: its logarithm has no rate."""
    before, last = norms[:, :-NEW], norms[:, -NEW:]
    if before.shape[1] < LEAST_BEFORE:
        return
    zero = (last == 0).all(axis=1)
    if not zero.any():
        return
    alive = (before[:, -LEAST_BEFORE:] > 0).all(axis=1) & ~(before == 0).any(axis=1)
    hit = np.flatnonzero(alive & zero)
    if not len(hit):
        return
    was, more = float(before[hit[0], -1]), f", as have {len(hit) - 1} more" if len(hit) > 1 else ""
    yield GRADIENT_DEPARTS.finding(
        "warning",
        f"The gradient of {TENSOR} has become exactly zero in the last {NEW} looks, after a norm of {was:.3g}{more}. "
        "It no longer learns.",
        where=moment.where(rows[hit[0]], "backward"),
        also=tuple(moment.where(rows[i], "backward") for i in hit[1:]),
        evidence={"first": "gradient", "norm": 0.0, "norm_before": was, "tensors": len(hit)},
    )


FACTOR_JUMPS = rule("AMP734", WATCHED)
LEAST_LOOKS = 6
GROWN = "its values have grown, and those of the next step may overflow"
SHRUNK = "its values have shrunk, and small ones of the next step may flush to zero"


@FACTOR_JUMPS.judges(TensorState)
def _factor_jumps(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    own = moment.eight_bit()
    if moment.seen < LEAST_LOOKS or not len(own):
        return
    scales = moment.values("scale", own)
    known = (scales > 0).all(axis=1)
    own, scales = own[known], scales[known]
    if not len(own):
        return
    changes = np.diff(np.log2(scales), axis=1)
    last, before = changes[:, -1], np.abs(changes[:, :-1]).max(axis=1)
    hit = np.flatnonzero(np.abs(last) >= before + thresholds[FACTOR_JUMPS["log2_change"]])
    if not len(hit):
        return
    worst = hit[np.argmax(np.abs(last[hit]))]
    falls = bool(last[worst] < 0)
    yield FACTOR_JUMPS.finding(
        "warning",
        f"The scale of {TENSOR} {'drops' if falls else 'rises'} {2.0 ** abs(last[worst]):.3g}-fold from one look "
        f"to the next: {GROWN if falls else SHRUNK}.",
        where=moment.where(own[worst], "forward"),
        also=tuple(moment.where(own[i], "forward") for i in hit if i != worst),
        evidence={
            "first": "scale",
            "log2_change": float(last[worst]),
            "largest_before": float(before[worst]),
            "scale": float(scales[worst, -1]),
        },
    )


HEADROOM_RUNS_OUT = rule("AMP726", WATCHED)
HEADROOM_LOOKS = 8
_STEADY = 5  # of the seven changes between eight looks, as many must go down
_LEAST_DRIFT = 0.5  # powers of two of headroom lost over the looks: less is noise
_FAR = 8.0  # powers of two of headroom above which a drift over eight looks is no forecast


@HEADROOM_RUNS_OUT.judges(TensorState)
def _headroom_runs_out(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    if moment.seen < HEADROOM_LOOKS:
        return
    rows = moment.rows("activation")
    rooms = moment.values("log2_headroom", rows)[:, -HEADROOM_LOOKS:]
    known = np.isfinite(rooms).all(axis=1)
    rows, rooms = rows[known], rooms[known]
    if not len(rows):
        return
    drift = slope(moment.steps[-HEADROOM_LOOKS:], rooms)
    steady = (np.diff(rooms, axis=1) < 0).sum(axis=1) >= _STEADY
    lost = medians(rooms[:, :3]) - medians(rooms[:, -3:])
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(drift < 0, rooms[:, -1] / -drift, np.inf)
    near = thresholds[HEADROOM_RUNS_OUT["near"]]
    close = rooms[:, -1] <= max(_FAR, near)
    ends = left <= thresholds[HEADROOM_RUNS_OUT["horizon"]]
    hit = np.flatnonzero(steady & (lost >= _LEAST_DRIFT) & close & ends)
    if not len(hit):
        return
    worst = hit[np.argmin(left[hit])]
    now = float(rooms[worst, -1])
    overflowed = now <= 0 or bool((moment.values("nonfinite", rows[worst : worst + 1])[:, -HEADROOM_LOOKS:] > 0).any())
    said = (
        "has overflowed its dtype"
        if overflowed
        else f"is {figure(2.0**now)} times smaller than the largest value of its dtype, and grows: it overflows "
        f"{ahead(float(left[worst]))}"
    )
    severity: Severity = "warning" if now < near else "note"
    yield HEADROOM_RUNS_OUT.finding(
        severity,
        f"The output of {TENSOR} {said}.",
        where=moment.where(rows[worst], "forward"),
        also=tuple(moment.where(rows[i], "forward") for i in hit if i != worst),
        evidence={
            "first": "logits",
            "log2_headroom": now,
            "log2_per_step": float(drift[worst]),
            "steps_left": float(left[worst]),
            "tensors": len(hit),
        },
    )


UNDERFLOW_SPREADS = rule("AMP725", WATCHED)
UNDERFLOW_LOOKS = (8, 5)
"""Looks over which a drift is measured: a slow one shows over many looks, a fast one must be reported after a few."""
_FIT = 0.8  # least share of the variance that the line must explain: a drift, not noise
_WIDE = ("fp64", "fp32", "tf32", "bf16")  # no gradient of a training underflows in these formats
_SAID = {"flushed_share": "becomes zero in fp16", "zero_share": "is zero"}
"""The measures, in this order, and their words in the message."""
_RESOLVED = 1e-4  # a sample does not resolve a smaller share


@UNDERFLOW_SPREADS.judges(TensorState)
def _underflow_spreads(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    rows = _in_half(moment)
    found = (
        finding
        for measure in _SAID
        for shares in [moment.values(measure, rows)]
        for looks in UNDERFLOW_LOOKS
        if moment.seen >= looks
        for finding in _spreads(moment, rows, measure, shares[:, -looks:], thresholds)
    )
    yield from itertools.islice(found, 1)


def _spreads(
    moment: TensorState, rows: np.ndarray, measure: str, shares: np.ndarray, thresholds: Thresholds
) -> Iterator[Finding]:
    """Warns of shares above the harmful one, or notes those on their way to it.

    fp16 zeros from inside a backward look like any other zeros. A share of zeros that was small and rises shows them.
    """
    looks, now, rise = shares.shape[1], shares[:, -1], thresholds[UNDERFLOW_SPREADS["rise"]]
    if not (now >= rise * np.maximum(shares[:, :3].min(axis=1), _RESOLVED)).any():
        return  # as at most looks; cheaper than the medians
    then = np.maximum(medians(shares[:, :3]), _RESOLVED)
    more = np.flatnonzero((now >= rise * then) & ~np.isnan(shares).any(axis=1))
    if not len(more):
        return
    rows, shares, now, then = rows[more], shares[more], now[more], then[more]
    logs = np.log(np.maximum(shares, _RESOLVED))
    drift = slope(moment.steps[-looks:], logs)
    harmful, risen = thresholds[UNDERFLOW_SPREADS["harmful"]], (drift > 0) & (_explained(logs) >= _FIT)
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.log(harmful / np.maximum(now, _RESOLVED)) / drift
    over = risen & (np.minimum(now, shares[:, -2]) >= harmful)
    coming = risen & ~over & (now > _RESOLVED) & (now < harmful) & (left <= thresholds[UNDERFLOW_SPREADS["horizon"]])
    for hit, severity in ((np.flatnonzero(over), "warning"), (np.flatnonzero(coming), "note")):
        if not len(hit):
            continue
        worst = hit[np.argmax(now[hit])] if severity == "warning" else hit[np.argmin(left[hit])]
        becomes = (
            f"from {harmful:.0%} on layers stop learning"
            if severity == "warning"
            else f"at this drift it passes {harmful:.0%} {ahead(float(left[worst]))}"
        )
        yield UNDERFLOW_SPREADS.finding(
            "warning" if severity == "warning" else "note",
            f"{now[worst]:.2%} of the gradient of {TENSOR} {_SAID[measure]}; "
            f"{moment.line.step - int(moment.steps[-looks]):,} steps ago it was {then[worst]:.2%}: {becomes}"
            f"{f', as do {len(hit) - 1} more' if len(hit) > 1 else ''}.",
            where=moment.where(rows[worst], "backward"),
            also=tuple(moment.where(rows[i], "backward") for i in hit if i != worst),
            evidence={
                "first": "gradient",
                measure: float(now[worst]),
                f"{measure}_before": float(then[worst]),
                "steps_left": None if severity == "warning" else float(left[worst]),
                "loss_scale": moment.line.loss_scale,
                "tensors": len(hit),
            },
        )


def _in_half(moment: TensorState) -> np.ndarray:
    """Rows of gradients that are half at some point: by their format, or all where the run computes in fp16.

    Autocast in fp16 gives outputs in fp16, and only fp16 needs a loss scale.
    """
    rows = np.concatenate([moment.rows(role) for role in ("gradient", "activation_gradient")])
    if moment.line.loss_scale is not None or any(moment.formats[row] == "fp16" for row in moment.rows("activation")):
        return rows
    return rows[[moment.formats[row] not in _WIDE for row in rows]] if len(rows) else rows


def _explained(values: np.ndarray) -> np.ndarray:
    """Returns the (rows) share of the variance that a straight line explains."""
    at = np.arange(values.shape[1]) - (values.shape[1] - 1) / 2
    centred = values - values.mean(axis=1, keepdims=True)
    total = (centred**2).sum(axis=1)
    explained = (centred @ at) ** 2 / (at @ at)
    share: np.ndarray = np.divide(explained, total, out=np.zeros_like(total), where=total > 0)
    return share


UPDATES_LOST = rule("AMP738", WATCHED)
UPDATES_LOST_LOST = UPDATES_LOST["lost"]
HALF = ("bf16", "fp16")


@UPDATES_LOST.judges(TensorState)
def _updates_lost(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    if moment.seen < NEW:
        return
    rows = np.array([row for row in moment.rows("parameter") if moment.formats[row] in HALF], dtype=np.int64)
    if not len(rows):
        return
    still = moment.values("unmoved_share", rows)[:, -NEW:]
    of_gradient = {moment.tensors[row]: row for row in moment.rows("gradient")}
    given = np.array([moment.tensors[row] in of_gradient for row in rows])
    known = given & ~np.isnan(still).any(axis=1)
    rows, still = rows[known], still[known]
    if not len(rows):
        return
    gradients = np.array([of_gradient[moment.tensors[row]] for row in rows])
    without = np.nan_to_num(moment.values("zero_share", gradients)[:, -NEW:], nan=1.0)
    moved = np.maximum(1.0 - without, 1e-9)
    lost = np.clip((still - without) / moved, 0.0, 1.0) * (without < 1.0)
    weights = np.nan_to_num(moment.values("elements", rows)[:, -1:]) * moved
    of_all = (lost * weights).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-9)
    if (of_all < thresholds[UPDATES_LOST_LOST]).any():
        return
    worst = int(np.argmax((lost * weights).sum(axis=1)))
    hit = [i for i in np.flatnonzero((lost >= thresholds[UPDATES_LOST_LOST]).all(axis=1)) if i != worst]
    name = moment.formats[rows[worst]]
    yield UPDATES_LOST.finding(
        "warning",
        f"In the last {NEW} looks {of_all[-1]:.0%} of the {name} weights that have a gradient did not move "
        f"({lost[worst, -1]:.0%} of {TENSOR}): their updates are too small for {name} and are rounded away.",
        where=moment.where(rows[worst]),
        also=tuple(moment.where(rows[i]) for i in hit),
        evidence={
            "first": "optimizer",
            "lost_share": float(of_all[-1]),
            "lost_share_of_tensor": float(lost[worst, -1]),
            "format": name,
        },
    )


_LEAST_MOVE = 1e-6
"""Least move by a step, as a share of the parameter's norm. A bias before a BatchNorm, or a model that has learned all,
moves less, by rounding errors: it stood still before."""
STANDS_STILL = rule("AMP727", WATCHED)


@STANDS_STILL.judges(TensorState)
def _stands_still(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    if moment.seen < 2 * NEW:
        return
    rows = moment.rows("parameter")
    ratios = moment.values("update_ratio", rows)
    known = ~np.isnan(ratios[:, -2 * NEW :]).any(axis=1)
    rows, ratios = rows[known], ratios[known]
    if not len(rows):
        return
    moved = (ratios[:, :-NEW] > _LEAST_MOVE).sum(axis=1) >= NEW
    still = (ratios[:, -NEW:] == 0).all(axis=1)
    if not still.any() or (ratios[:, -NEW:] > 0).all(axis=1).mean() < thresholds[STANDS_STILL["others"]]:
        return
    hit = np.flatnonzero(moved & still & _reached(moment, rows))
    if not len(hit):
        return
    worst = hit[0]
    usual = float(np.median(ratios[worst, :-NEW]))
    yield STANDS_STILL.finding(
        "warning",
        f"{TENSOR} has a gradient and has not moved in the last {NEW} looks. Before, a step moved it by {usual:.2g} "
        f"of its norm{f', as for {len(hit) - 1} more' if len(hit) > 1 else ''}.",
        where=moment.where(rows[worst]),
        also=tuple(moment.where(rows[i]) for i in hit[1:]),
        evidence={"first": "optimizer", "update_ratio_before": usual, "tensors": len(hit)},
    )


def _reached(moment: TensorState, rows: np.ndarray) -> np.ndarray:
    """Returns (rows): the parameter's gradient was nonzero in all last looks, and not far below its earlier norm."""
    of_gradient = {moment.tensors[row]: row for row in moment.rows("gradient")}
    norms = moment.values("norm")
    found = np.zeros(len(rows), bool)
    for i, row in enumerate(rows):
        at = of_gradient.get(moment.tensors[row])
        if at is not None:
            last, before = norms[at, -NEW:], norms[at, :-NEW]
            found[i] = bool((last > 0).all() and np.nanmedian(last) > 0.01 * np.nanmedian(before))
    return found


WEIGHTS_GROW = rule("AMP733", WATCHED)
WEIGHTS_SHRINK = rule("AMP737", WATCHED)

_LOGITS = re.compile(
    r"(^|[._])(q|k|wq|wk|query|key|q_proj|k_proj|qkv|qkv_proj|query_key_value|wqkv|c_attn|in_proj_weight|in_proj_bias"
    r"|logit_scale|lm_head)([._]|$)",
    re.IGNORECASE,
)
"""Names of modules that make logits (attention, output) in torch, Transformers, timm, Megatron, OpenCLIP."""


@WEIGHTS_GROW.judges(TensorState)
def _weights_grow(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    return _weights_break(moment, thresholds, WEIGHTS_GROW, sign=1)


@WEIGHTS_SHRINK.judges(TensorState)
def _weights_shrink(moment: TensorState, thresholds: Thresholds) -> Iterator[Finding]:
    return _weights_break(moment, thresholds, WEIGHTS_SHRINK, sign=-1)


def _weights_break(moment: TensorState, thresholds: Thresholds, rule: Rule, *, sign: int) -> Iterator[Finding]:
    found = weight_breaks(
        moment,
        sign=sign,
        least=thresholds[rule["deviations"]],
        share=thresholds[rule["share"]],
        change=thresholds[rule["change"]],
    )
    if not found:
        return
    worst = found[0]
    logits = sign > 0 and all(_LOGITS.search(moment.name(one.row)) for one in found)
    yield rule.finding(
        "warning",
        f"The norm of {TENSOR} has begun to {'grow' if sign > 0 else 'shrink'}: from {worst.before:.4g} to "
        f"{worst.now:.4g} over the last {'look' if worst.looks == 1 else f'{worst.looks} looks'}. That is "
        f"{worst.by:.0f} robust deviations {'above' if sign > 0 else 'below'} its trend"
        f"{f', as for {len(found) - 1} more' if len(found) > 1 else ''}.",
        where=moment.where(worst.row),
        also=tuple(moment.where(one.row) for one in found[1:]),
        evidence={
            "first": "logits" if logits else moved_first(moment, worst),
            "norm": worst.now,
            "norm_before": worst.before,
            "deviations": worst.by,
            "looks": worst.looks,
            "tensors": len(found),
        },
    )
