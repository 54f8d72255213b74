"""AMP734: a tensor's own scale factor drops or rises at once."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.arrays import np
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import TensorMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

BINADES = Threshold(
    code="AMP734",
    name="binades",
    default=3.0,
    unit="binades",
    lowest=0.5,
    highest=100.0,
    why="By which a tensor's own scale changes from one look to the next, beyond the largest change before: eight "
    "times. A factor from the largest value of the last steps announces with a drop that values have grown, with a "
    "rise that small ones are gone.",
)
RULE = register(
    "AMP734",
    "factor-jumps",
    "A tensor's own scale factor changes at once",
    worst="warning",
    commands=WATCHED,
    thresholds=(BINADES,),
)
LEAST_LOOKS = 6
GROWN = "its values have grown, and those of the next step may overflow"
SHRUNK = "its values have shrunk, and small ones of the next step may flush to zero"


@RULE.judges(TensorMoment)
def _factor_jumps(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
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
    hit = np.flatnonzero(np.abs(last) >= before + thresholds[BINADES])
    if not len(hit):
        return
    worst = hit[np.argmax(np.abs(last[hit]))]
    falls = bool(last[worst] < 0)
    yield over_time_finding(
        RULE,
        "warning",
        f"The scale of {TENSOR} {'drops' if falls else 'rises'} by {abs(last[worst]):.1f} binades from one look to the "
        f"next: {GROWN if falls else SHRUNK}.",
        step=moment.line.step,
        first="scale",
        phase="forward",
        tensor=moment.tensors[own[worst]],
        also=[moment.tensors[own[i]] for i in hit if i != worst],
        evidence={
            "binades": float(last[worst]),
            "largest_before": float(before[worst]),
            "scale": float(scales[worst, -1]),
        },
    )
