"""The movable thresholds of rules that a replay decides; their defaults stand only here.

A rule of `diagnosis` reads the value from its `Thresholds`, and its page shows this file's default and reason.
"""

from __future__ import annotations

from ampdoctor.evidence.thresholds.threshold import Threshold

DEPARTURE = Threshold(
    code="AMP201",
    name="departure",
    default=1 / 16,
    unit="share",
    why="Share of itself by which a finite value made from an overflow is off: inf -> rsqrt -> 0 is off by 1, inf -> "
    "tanh -> 1 by 0, and a few roundings to bf16 by 2^-9 each.",
)
DEPARTS = Threshold(
    code="AMP207",
    name="relative_error",
    default=0.1,
    unit="relative L2 error",
    why="Error of the gradients that nothing explains: beyond it runs were seen to fail (as AMP301.error_bad).",
)
FLUSHED = Threshold(
    code="AMP301",
    name="flushed",
    default=1e-3,
    unit="share",
    why="Share of nonzero gradient elements that may become zero: what adaptive loss scaling aims at (Zhao et al., "
    "arXiv 1910.12385). Of profile and recommend.",
    option="--tau",
)
ERROR_NOTE = Threshold(
    code="AMP301",
    name="error_note",
    default=5e-3,
    unit="relative L2 error",
    lowest=1e-6,
    why="Error of the weight gradients that is as good as bf16's (measured: 3.3e-3 to 5.5e-3). Of profile and "
    "recommend, whose choice of a loss scale aims at it too.",
    option="--error-note",
)
ERROR_WARNING = Threshold(
    code="AMP301",
    name="error_warning",
    default=2e-2,
    unit="relative L2 error",
    why="From here on training was measurably worse (12-block transformer: up to 7e-3 it equals fp32's, 1.5e-2 to 9e-2 "
    "costs loss).",
    above=ERROR_NOTE,
    option="--error-warning",
)
ERROR_BAD = Threshold(
    code="AMP301",
    name="error_bad",
    default=0.1,
    unit="relative L2 error",
    why="From here on it failed to learn (same measurement: at 0.3 it does).",
    above=ERROR_WARNING,
    option="--error-bad",
)
ZEROED_SHARE = Threshold(
    code="AMP301",
    name="zeroed_share",
    default=0.5,
    unit="share",
    why="Share of the squared error that flushed elements make up, where it is underflow: most of it; rounding makes "
    "up the rest. Of bisect-nan.",
)
ZEROED = Threshold(
    code="AMP301",
    name="zeroed",
    default=0.1,
    unit="share",
    why="Or the share of elements that are flushed: what is left of the others is then subnormal and as far off "
    "(0.93 in a collapsed run, below 1e-3 in healthy ones). Of bisect-nan.",
)
SHARE_WARNING = Threshold(
    code="AMP301",
    name="share_warning",
    default=0.3,
    unit="share",
    why="Share of flushed activation gradients with which 12-block transformers trained a little worse (30 to 45 %; "
    "with 19 % as well as in fp32). Of profile, where no step in fp16 measured the error.",
)
SHARE_BAD = Threshold(
    code="AMP301",
    name="share_bad",
    default=0.7,
    unit="share",
    why="And with which they did not learn (70 to 84 %).",
    above=SHARE_WARNING,
)
CLEARLY_BETTER = Threshold(
    code="AMP301",
    name="better",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Factor by which another loss scale must lower the error before the present one is blamed. Of recommend.",
)
HEADROOM = Threshold(
    code="AMP302",
    name="headroom",
    default=1.0,
    unit="binades",
    lowest=0.0,
    highest=15.0,
    why="Distance to fp16's 65504 within which activations are reported: one doubling from overflow.",
)
FP32_SHARE = Threshold(
    code="AMP303",
    name="fp32_share",
    default=0.2,
    unit="share",
    why="Share of the parameters beyond which fp32 modules are no longer the cheap answer (our default).",
    option="--fp32-share",
)
MISUSE_RATIO = Threshold(
    code="AMP407",
    name="ratio",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Factor by which the gradient that reaches the optimizer is too long or too short: rounding alone would need a "
    "relative error of 0.5 for 2.",
)
MISUSE_ERROR = Threshold(
    code="AMP407",
    name="relative_error",
    default=0.1,
    unit="relative L2 error",
    why="Error of the gradients from which a part of them is suspected of another scale (as AMP301.error_bad).",
)
STALLED = Threshold(
    code="AMP501",
    name="stalled",
    default=0.75,
    unit="share",
    why="Share of the elements that move in fp32 and stay, and share of the update that is lost: 0.97 to 1.0 where "
    "training stands still, 0.42 in a pure fp16 run that learns.",
)
SKIP_RATE = Threshold(
    code="AMP707",
    name="skip_rate",
    default=1e-3,
    unit="share",
    lowest=1e-6,
    highest=0.5,
    why="Share of steps that a scaler may skip once it has settled: what OpenSeq2Seq's LogMax scaler aims at. Of "
    "recommend, which derives the growth interval from it.",
    option="--rho",
)
HORIZON = Threshold(
    code="AMP707",
    name="horizon",
    default=10_000,
    unit="steps",
    lowest=1,
    highest=1_000_000,
    why="Steps ahead over which skips are counted in a simulation, which goes through it step by step: a short "
    "training run. Of recommend.",
    option="--horizon",
)
NORMS_IN_A_ROW = Threshold(
    code="AMP902",
    name="norms",
    default=2,
    unit="entries",
    lowest=1,
    highest=1_000_000,
    why="Gradient norms at a log's end that are not finite, from which it says that the run fails: a loss scale that "
    "was just tried gives one.",
)
