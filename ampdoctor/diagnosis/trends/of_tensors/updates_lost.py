"""AMP738: most weights of a half model stay as they are, because the update is less than half of their spacing."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import NEW, TensorMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

LOST = Threshold(
    code="AMP738",
    name="lost",
    default=0.5,
    unit="share",
    why="Of the weights that have a gradient and are left as they were, in each of the last three looks. Rounding to "
    "nearest loses an update of less than half the spacing (2^-9 to 2^-8 of a weight in bf16) whole and each time "
    "(arXiv:2010.06192): what is not lost now and then is lost for good.",
)
RULE = register(
    "AMP738",
    "updates-lost",
    "Most weights do not move: their updates are rounded away",
    worst="warning",
    commands=WATCHED,
    thresholds=(LOST,),
)
HALF = ("bf16", "fp16")


@RULE.judges(TensorMoment)
def _updates_lost(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
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
    if (of_all < thresholds[LOST]).any():
        return
    worst = int(np.argmax((lost * weights).sum(axis=1)))
    hit = [i for i in np.flatnonzero((lost >= thresholds[LOST]).all(axis=1)) if i != worst]
    name = moment.formats[rows[worst]]
    yield over_time_finding(
        RULE,
        "warning",
        f"{of_all[-1]:.0%} of the {name} weights that have a gradient are left as they were by the step "
        f"({lost[worst, -1]:.0%} of {TENSOR}), and so it was in the last {NEW} looks: updates of less than half their "
        "spacing are rounded away.",
        step=moment.line.step,
        first="optimizer",
        tensor=moment.tensors[rows[worst]],
        also=[moment.tensors[rows[i]] for i in hit],
        evidence={"lost_share": float(of_all[-1]), "lost_share_of_tensor": float(lost[worst, -1]), "format": name},
    )
