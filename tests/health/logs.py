"""Logs of runs as tests write them."""

from __future__ import annotations

from ampdoctor.evidence.log_records import DetailLine, Line, LogRecord, RunLine, Stamp, StepLine, TensorDetail
from ampdoctor.evidence.log_text import text_of

NAMES = ("a.weight", "b.weight")
HEADER = RunLine(name="small", tensors=NAMES, optimizers=("AdamW",), scalers=("scaler",), precision="fp16")


def stamped(line: Line, **stamp) -> LogRecord:
    return LogRecord(Stamp(**{"run_id": "7f", "time_ms": 1_795_433_197_000, **stamp}), line)


def write(path, lines, **stamp):
    """Write lines; those that are not stamped yet get this stamp."""
    whole = [line if isinstance(line, LogRecord) else stamped(line, **stamp) for line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(text_of, whole)))
    return path


def steps(first, last, **fields):
    """Steps of a quiet run; not ten losses in a row are the same to the last digit."""
    return [
        StepLine(**{"step": at, "loss": 2.0 + 1e-5 * (at % 5 == 4), "gradient_norm": 0.5, **fields})
        for at in range(first, last)
    ]


def detail(step, *norms, role="gradient", **fields):
    tensors = [TensorDetail(tensor=at, role=role, norm=norm, **fields) for at, norm in enumerate(norms)]
    return DetailLine(step=step, tensors=tuple(tensors))
