"""AMP725: more and more of a gradient becomes zero in the half format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, ahead, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import TensorMoment, medians, slope
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

HARMFUL = Threshold(
    code="AMP725",
    name="harmful",
    default=0.05,
    unit="share",
    why="Of the nonzero elements that become zero: the folk rule's 5 %, here of what is flushed and not of what was "
    "zero to begin with (ReLU makes half of a gradient zero in health).",
)
RISE = Threshold(
    code="AMP725",
    name="rise",
    default=4.0,
    unit="factor",
    lowest=1.1,
    highest=1e6,
    why="Above the share of the first looks that are remembered: what has been there all along is `profile`'s to "
    "judge, and no trend.",
)
HORIZON = Threshold(
    code="AMP725",
    name="horizon",
    default=2000,
    unit="steps",
    lowest=1,
    highest=10_000_000,
    why="Within which a share that rises must reach the harmful one to be worth a note.",
)
RULE = register(
    "AMP725",
    "underflow-spreads",
    "More and more of a gradient is flushed to zero",
    worst="warning",
    commands=WATCHED,
    thresholds=(HARMFUL, RISE, HORIZON),
)
LOOKS = (8, 5)
"""Looks over which a drift is measured: a slow one shows over many, a fast one must be told after few."""
_FIT = 0.8
"""Share of the variance that the line must explain: a drift, and no noise."""
_WIDE = ("fp64", "fp32", "tf32", "bf16")
"""Formats in which no gradient of a training becomes zero."""
_SAID = {"flushed_share": "becomes zero in the half format", "zero_share": "is zero"}
"""What is looked at, in this order, and how it is said."""
_LEAST = 1e-4
"""A share below it is not resolved by a sample."""


@RULE.judges(TensorMoment)
def _underflow_spreads(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
    rows = _in_half(moment)
    found = (
        finding
        for measure in _SAID
        for shares in [moment.values(measure, rows)]
        for looks in LOOKS
        if moment.seen >= looks
        for finding in _spreads(moment, rows, measure, shares[:, -looks:], thresholds)
    )
    yield from itertools.islice(found, 1)


def _spreads(
    moment: TensorMoment, rows: np.ndarray, measure: str, shares: np.ndarray, thresholds: Thresholds
) -> Iterator[Finding]:
    """A warning of those over the harmful share, or a note of those on their way to it, or nothing.

    What fp16 has made zero inside a backward cannot be told from other zeros when it arrives: it is of the zeros, whose
    share was small at first, and rises.
    """
    looks, now, rise = shares.shape[1], shares[:, -1], thresholds[RISE]
    if not (now >= rise * np.maximum(shares[:, :3].min(axis=1), _LEAST)).any():
        return  # as at most looks: none is far above the least of its first, nor above their median
    then = np.maximum(medians(shares[:, :3]), _LEAST)
    more = np.flatnonzero((now >= rise * then) & ~np.isnan(shares).any(axis=1))
    if not len(more):
        return
    rows, shares, now, then = rows[more], shares[more], now[more], then[more]
    logs = np.log(np.maximum(shares, _LEAST))
    drift = slope(moment.steps[-looks:], logs)
    harmful, risen = thresholds[HARMFUL], (drift > 0) & (_explained(logs) >= _FIT)
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.log(harmful / np.maximum(now, _LEAST)) / drift
    over = risen & (np.minimum(now, shares[:, -2]) >= harmful)
    coming = risen & ~over & (now > _LEAST) & (now < harmful) & (left <= thresholds[HORIZON])
    for hit, severity in ((np.flatnonzero(over), "warning"), (np.flatnonzero(coming), "note")):
        if not len(hit):
            continue
        worst = hit[np.argmax(now[hit])] if severity == "warning" else hit[np.argmin(left[hit])]
        becomes = (
            f"above the {harmful:.0%} from which layers stop learning"
            if severity == "warning"
            else f"at this drift it passes {harmful:.0%} {ahead(float(left[worst]))}"
        )
        yield over_time_finding(
            RULE,
            "warning" if severity == "warning" else "note",
            f"{now[worst]:.2%} of the gradient of {TENSOR} {_SAID[measure]}, after {then[worst]:.2%} "
            f"{moment.line.step - int(moment.steps[-looks]):,} steps ago: {becomes}"
            f"{f'; so do {len(hit) - 1} more' if len(hit) > 1 else ''}.",
            step=moment.line.step,
            first="gradient",
            phase="backward",
            tensor=moment.tensors[rows[worst]],
            also=[moment.tensors[rows[i]] for i in hit if i != worst],
            evidence={
                measure: float(now[worst]),
                f"{measure}_before": float(then[worst]),
                "steps_left": None if severity == "warning" else float(left[worst]),
                "loss_scale": moment.line.loss_scale,
                "tensors": len(hit),
            },
        )


def _in_half(moment: TensorMoment) -> np.ndarray:
    """Rows of gradients that are half on their way: by their format, or all where the run computes in fp16.

    Autocast in fp16 gives outputs in fp16, and a loss is scaled for nothing else.
    """
    rows = np.concatenate([moment.rows(role) for role in ("gradient", "activation_gradient")])
    if moment.line.loss_scale is not None or any(moment.formats[row] == "fp16" for row in moment.rows("activation")):
        return rows
    return rows[[moment.formats[row] not in _WIDE for row in rows]] if len(rows) else rows


def _explained(values: np.ndarray) -> np.ndarray:
    """(rows) share of the variance that a straight line explains."""
    at = np.arange(values.shape[1]) - (values.shape[1] - 1) / 2
    centred = values - values.mean(axis=1, keepdims=True)
    total = (centred**2).sum(axis=1)
    explained = (centred @ at) ** 2 / (at @ at)
    share: np.ndarray = np.divide(explained, total, out=np.zeros_like(total), where=total > 0)
    return share
