"""A line of every kind, with every field set."""

from __future__ import annotations

import math

from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.run_log.details import DetailLine, TensorDetail
from ampdoctor.evidence.run_log.lines import (
    ActionLine,
    AlertLine,
    CheckpointLine,
    EndLine,
    LookLine,
    LostLine,
    RunLine,
    Stamp,
    Stamped,
    StepLine,
)
from ampdoctor.evidence.where import Source, Where

STAMP = Stamp(run_id="7f", attempt=2, branch=0, rank=3, world_size=8, restarts=1, time_ms=1_795_433_197_163)
FINDING = Finding(
    code="AMP201",
    name="forward-overflow",
    severity="error",
    message="An op overflows.",
    where=Where(step=7, phase="forward", module="block.3", op="aten.linear", source=Source(file="a.py", line=3)),
    also=(Where(phase="loss"),),
    cause="forward_overflow",
    evidence={"worst": math.inf, "names": ["a", "b"]},
    help="Run it in fp32.",
    prescription=Prescription(kind="fp32_modules", value=["block.3"], status="verified"),
)
HISTOGRAM = {
    "version": 1,
    "zeros": 3,
    "nans": 0,
    "pos_infs": 1,
    "neg_infs": 0,
    "amax": (1.0).hex(),
    "amin": (0.5).hex(),
    "significand_bits": 11,
    "min_spacing": (2.0**-24).hex(),
    "bins": [1007, 1015],
    "counts": [5, 6],
}
TENSOR = TensorDetail(
    tensor=1,
    role="activation_gradient",
    part="output",
    call=1,
    format="fp16",
    elements=15,
    sampled=12,
    norm=2.5,
    amax=1.0,
    nonfinite=1,
    scale=65536.0,
    block=32,
    zero_share=0.25,
    flushed_share=0.125,
    headroom_binades=3.5,
    update_ratio=0.001,
    unmoved_share=0.25,
    histogram=HISTOGRAM,
)
LINES = (
    RunLine(
        name="gpt2",
        tool="1.0",
        segment=3,
        tensors=("a.weight", "ä"),
        optimizers=("optimizer",),
        scalers=("scaler",),
        precision="fp16",
        autocast=True,
        master_weights=False,
        accumulation=4,
        detail_every=100,
        groups=(((0, 1), (2,)), ((3,),)),
        scaler={"scale": 65536.0, "_growth_tracker": 3},
    ),
    StepLine(
        step=31000,
        accepted=30990,
        micro_steps=4,
        optimizer=1,
        scaler=1,
        loss=math.nan,
        gradient_norm=math.inf,
        norm_local=True,
        norm_reduced=True,
        norm_scaled=True,
        norm_clipped=True,
        max_norm=1.0,
        loss_scale=65536.0,
        skipped=True,
        growth_tracker=17,
        learning_rates=(0.001, 0.0),
        weight_decays=(0.01, 0.0),
        seconds=0.25,
        data_seconds=0.0625,
        memory_bytes=2**36,
        memory_retries=2,
        samples=10**12,
        tokens=2**50,
        batch_elements=2**20,
        batch_rms=1.25,
        batch_zero_share=0.5,
        batch_fingerprint=2**32 - 1,
    ),
    DetailLine(step=7, reason="gradient-spike", optimizer=1, loss_scale=1024.0, tensors=(TENSOR,)),
    AlertLine(step=7, finding=FINDING),
    ActionLine(step=7, action="rollback", reason="The loss is NaN.", facts={"to": 5}),
    CheckpointLine(step=7, path="c/7", health="probation", reason="Young.", size_bytes=12, seconds=0.5),
    LookLine(
        step=7, verdict="sick", findings=(FINDING,), bundle="bundle-7", model="train.py", reason="No room.", seconds=1.5
    ),
    LostLine(details=1, steps=2, others=3, unmade=4, thinned=5),
    EndLine(exit_code=1, steps=8, accepted=7, reason="SIGTERM"),
)
EVERY = {type(line).__name__: Stamped(stamp=STAMP, line=line) for line in LINES}
