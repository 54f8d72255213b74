"""Lines of a run as its log has them."""

from __future__ import annotations

import math

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.log_records import (
    ActionLine,
    AlertLine,
    CheckpointLine,
    DetailLine,
    EndLine,
    LogRecord,
    LookLine,
    RunLine,
    Stamp,
    StepLine,
    TensorDetail,
)
from ampdoctor.evidence.report import Finding

BEGAN_MS = 1_790_000_000_000
NAMES = tuple(f"layers.{i}.weight" for i in range(100))


def stamped(line, second=0.0, **stamp):
    return LogRecord(
        stamp=Stamp(run_id="5c1f0e6bd2f7a390", time_ms=BEGAN_MS + round(1000 * second), **stamp), line=line
    )


def finding(code="AMP721", severity="warning", **more):
    about = {"name": "loss-spike", "cause": None, "message": "The loss rises 4.2-fold.", "help": "Lower the rate."}
    return Finding(code=code, severity=severity, where=Where(phase="loss", step=3), **(about | more))


def a_run():
    """Ten steps, of which one is skipped and one has no finite loss, with a look of two lines, and what was said."""
    header = RunLine(name="small", tool="0.1.0", tensors=NAMES, optimizers=("optimizer",), precision="fp16")
    yield stamped(header)
    for step in range(10):
        loss = math.nan if step == 7 else 4.0 - step / 4
        line = StepLine(
            step=step,
            loss=loss,
            gradient_norm=math.inf if step == 4 else 2.0,
            max_norm=0.5,
            loss_scale=2.0**15 if step > 4 else 2.0**16,
            skipped=step == 4,
            learning_rates=(1e-3, 1e-4),
            seconds=0.5,
            data_seconds=0.125,
            memory_bytes=3 * 2**30,
            memory_retries=0,
            tokens=4096 * (step + 1),
        )
        yield stamped(line, step / 2)
        if step == 5:
            for start in (0, 64):
                tensors = tuple(tensor(i) for i in range(start, min(start + 64, 100)))
                yield stamped(DetailLine(step=5, tensors=tensors), step / 2)
    yield stamped(AlertLine(step=7, finding=finding()), 4.0)
    yield stamped(LookLine(step=7, verdict="sick", findings=(finding("AMP201", "error", cause="nan_input"),)), 4.0)
    yield stamped(ActionLine(step=7, action="rollback", reason="The loss is not finite."), 4.1)
    yield stamped(CheckpointLine(step=6, path="step6", health="good"), 4.2)
    yield stamped(EndLine(exit_code=0, steps=10, accepted=9), 5.0)


def tensor(index):
    return TensorDetail(
        tensor=index,
        role="gradient",
        flushed_share=index / 200,
        zero_share=0.0,
        log2_headroom=20.0 - index / 10,
        update_ratio=1e-3,
        nonfinite=int(index == 3),
    )
