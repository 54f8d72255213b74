"""Reports that tests of the renderers and of the command line share."""

from __future__ import annotations

from dataclasses import replace

from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Check, ErrorNote, Finding, FixedEntry, Prescription, Report, Skipped
from ampdoctor.evidence.report_scaler import FlushedGradients, ScalerArguments, ScalerSection, ScalingOutcome
from ampdoctor.evidence.report_scan import ChangedCheckpoint, ChangeSection
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.reports import formats
from ampdoctor.reports.formats import RenderOptions


def range_figures(flushed: float, subnormal: float, error: float) -> dict[str, float]:
    """What a format does to values, as a report has it."""
    shares = {"flushed": flushed, "subnormal": subnormal, "overflowed": 0.0, "zeros": 0.0}
    return {**shares, "relative_error": error}


FIXED = FixedEntry(
    fingerprint="0123456789abcdef",
    code="AMP101",
    severity="error",
    module="",
    op=None,
    tensor="w",
    file=None,
    message="A NaN",
)
NOTHING_CHANGED = ChangeSection(
    old=ChangedCheckpoint(path="old.pt", global_step=None, scale=None),
    new=ChangedCheckpoint(path="new.pt", global_step=None, scale=None),
    steps=None,
    roles={},
    growth=(),
    tensors=(),
    appeared=(),
    vanished=(),
    reshaped={},
)
OVERFLOW = Finding(
    code="AMP201",
    name="forward-overflow",
    severity="error",
    message="the output reaches 98304, beyond fp16's 65504",
    cause="forward_overflow",
    where=Where(
        step=3,
        micro_batch=1,
        phase="forward",
        module="encoder.block.3.ff.wo",
        call=2,
        op="aten.linear",
        nonfinite="inf",
        source=Source("t5.py", 41),
    ),
    evidence={"output_amax_fp32": 98304.0, "fp16_max": 65504.0, "inputs": [{"amax": 112.25}, {"amax": 1.5}]},
    help="Keep this module in fp32.",
    prescription=Prescription(
        kind="fp32_modules",
        value=("encoder.block.3.ff.wo",),
        status="verified",
        detail="run encoder.block.3.ff.wo in fp32",
        alternatives=(Prescription(kind="dtype", value="bf16", status="failed", reason="the loss differs by 4 %"),),
    ),
)
UNDERFLOW = Finding(
    code="AMP301",
    name="gradient-underflow",
    severity="warning",
    message="31 % of the nonzero weight gradients flush to zero",
    where=Where(phase="backward", tensor="blocks.0.fc.weight", file="model.safetensors"),
    evidence={"flushed": 0.3141592653589793, "worst": float("inf"), "unknown": float("nan")},
)
SICK = Report(
    command="bisect-nan",
    target={"factory": "t5.py:make_run"},
    run={"device": "cpu", "policy": "cuda", "precision": "fp16", "steps": 8, "deterministic": True, "threads": 2},
    verdict="sick",
    findings=(OVERFLOW, UNDERFLOW),
    checks=(Check(name="finite gradients", result="found"), Check(name="finite loss", result="ok")),
    skipped=(Skipped(what="extra.bin", reason="a Git LFS pointer"),),
    scaler=ScalerSection(
        current={"init_scale": 65536.0},
        recommended=ScalerArguments(init_scale=2.0**20, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000),
        change=True,
        bound_by="encoder.block.3.ff.wo",
        predicted=ScalingOutcome(
            skip_rate=0.0, flushed=FlushedGradients(activation_grad=0.00001, weight_grad=0.125), relative_error=1e-4
        ),
    ),
    profile={
        "steps": 1,
        "loss_scale": 1024.0,
        "recommended_scale": 4096.0,
        "shadows": [],
        "modules": [],
        "updates": [],
        "summary": {
            "bf16": {"weight_grad": range_figures(0.0, 0.0, 2e-3)},
            "fp16": {"weight_grad": range_figures(0.31, 0.2, 0.1)},
        },
        "sites": [
            {
                "name": "blocks.0.weight",
                "module": "blocks.0",
                "kind": "weight_grad",
                "part": "parameter",
                "half": True,
                "weight": 4,
                "numel": 4,
                "zeros": 0,
                "nonfinite": 0,
                "amax": 1e-3,
                "amin": 1e-9,
                "quantiles": {"0.5": 1e-6},
                "formats": {"fp16": range_figures(0.31, 0.2, 0.1)},
                "amax_by_step": [1e-3],
                "histogram": Histogram.empty().to_dict(),
            }
        ],
    },
)
HEALTHY = Report(
    command="scan",
    target={"path": "model.safetensors", "format": "safetensors"},
    verdict="healthy",
    checks=(Check(name="finite weights", result="ok", headroom={"log2": 7.5}),),
)
INCOMPLETE = replace(
    HEALTHY,
    verdict="inconclusive",
    complete=False,
    errors=(ErrorNote(what="shard-2.safetensors", kind="truncated", message="the file ends early"),),
)
WARNED = replace(SICK, verdict="healthy", findings=(UNDERFLOW,))
NOT_REPRODUCED = replace(HEALTHY, command="bisect-nan", verdict="not_reproduced")
EVERY = {"sick": SICK, "healthy": HEALTHY, "incomplete": INCOMPLETE, "warned": WARNED, "not_reproduced": NOT_REPRODUCED}


def renderer(form):
    """Return what renders a report in this form, for a page of 200 columns."""
    return lambda report: formats.renderer(form)(report, RenderOptions(width=200))
