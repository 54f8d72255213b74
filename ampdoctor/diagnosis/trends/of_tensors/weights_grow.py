"""AMP733: weights begin to grow as they have not grown before."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import TENSOR, over_time_finding
from ampdoctor.diagnosis.over_time.tensor_courses import TensorMoment
from ampdoctor.diagnosis.over_time.weight_breaks import moved_first, weight_breaks
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

DEVIATIONS = Threshold(
    code="AMP733",
    name="deviations",
    default=28.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1e6,
    why="By which the growth of a weight's norm over the last one, two or three looks is above that of up to twelve "
    "before: the healthy trainings of benchmarks/alerts stay below 16, those whose weights run away reach 30 to 160.",
)
CHANGE = Threshold(
    code="AMP733",
    name="change",
    default=0.15,
    unit="e-folds",
    lowest=0.0,
    highest=100.0,
    why="By which the norm must have grown over these looks: what is out of the usual in a norm that hardly moves at "
    "all harms nobody.",
)
SHARE = Threshold(
    code="AMP733",
    name="share",
    default=0.1,
    unit="share",
    why="Of the norm of all weights that a tensor must have: a bias that starts at zero grows by any factor, and "
    "matters to none.",
)
RULE = register(
    "AMP733",
    "weights-grow",
    "Weights begin to grow",
    worst="warning",
    commands=WATCHED,
    thresholds=(DEVIATIONS, CHANGE, SHARE),
)

_LOGITS = re.compile(
    r"(^|[._])(q|k|wq|wk|query|key|q_proj|k_proj|qkv|qkv_proj|query_key_value|wqkv|c_attn|in_proj_weight|in_proj_bias"
    r"|logit_scale|lm_head)([._]|$)",
    re.IGNORECASE,
)
"""Names of what makes the logits of attention or of the output, in torch, Transformers, timm, Megatron, OpenCLIP."""


@RULE.judges(TensorMoment)
def _weights_grow(moment: TensorMoment, thresholds: Thresholds) -> Iterator[Finding]:
    found = weight_breaks(
        moment, sign=1, least=thresholds[DEVIATIONS], share=thresholds[SHARE], change=thresholds[CHANGE]
    )
    if not found:
        return
    worst = found[0]
    yield over_time_finding(
        RULE,
        "warning",
        f"The norm of {TENSOR} has begun to grow: from {worst.before:.4g} to {worst.now:.4g} over the last "
        f"{'look' if worst.looks == 1 else f'{worst.looks} looks'}, {worst.by:.0f} robust deviations above its growth "
        f"before{f'; so have {len(found) - 1} more' if len(found) > 1 else ''}.",
        step=moment.line.step,
        first="logits" if all(_LOGITS.search(moment.name(one.row)) for one in found) else moved_first(moment, worst),
        tensor=moment.tensors[worst.row],
        also=[moment.tensors[one.row] for one in found[1:]],
        evidence={
            "norm": worst.now,
            "norm_before": worst.before,
            "deviations": worst.by,
            "looks": worst.looks,
            "tensors": len(found),
        },
    )
