"""The thresholds that are no rule's alone: `scaling` chooses a loss scale by them, and the command line names them.

Every other stands in the file of its rule, in `diagnosis`, and these are listed there too.
"""

from __future__ import annotations

from ampdoctor.evidence.thresholds.threshold import Threshold

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
FP32_SHARE = Threshold(
    code="AMP303",
    name="fp32_share",
    default=0.2,
    unit="share",
    why="Share of the parameters beyond which fp32 modules are no longer the cheap answer (our default).",
    option="--fp32-share",
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
