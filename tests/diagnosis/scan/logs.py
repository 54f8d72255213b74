"""Training logs to judge, and what the rules say of them."""

from __future__ import annotations

import itertools
import math
import random

from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, LogEntry, ScalerState, TensorSummary


def entry(step, loss=None, norm=None, scale=None, rate=None) -> LogEntry:
    return LogEntry(step=step, loss=loss, grad_norm=norm, scale=scale, learning_rate=rate)


def run(steps=200, every=1, seed=0) -> list[LogEntry]:
    """A healthy run: a falling loss and a noisy norm."""
    rng = random.Random(seed)
    return [
        entry(s, 2.5 * math.exp(-s / 500) + rng.gauss(0, 0.1), math.exp(rng.gauss(0, 0.4)), rate=1e-3)
        for s in range(every, steps + 1, every)
    ]


def weights(dtype="float32", elements=1 << 20) -> TensorSummary:
    return TensorSummary(
        name="fc.weight",
        role="weight",
        entry="weight",
        module="fc",
        group="",
        file="c.pt",
        dtype=dtype,
        shape=(1 << 10, 1 << 10),
        examined=elements,
        counted=elements,
        zeros=0,
        nan=0,
        inf=0,
        amax=0.1,
        amin=1e-4,
    )


def diagnosed(log, *, scale=None, dtype="float32", **changes):
    scalers = () if scale is None else (ScalerState(scale=scale, growth_tracker=5),)
    values = {"format": "folder", "tensors": (weights(dtype),), "scalers": scalers, "log": tuple(log)}
    return judge(CheckpointSummary(**(values | changes)))


def found(log, **changes) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in diagnosed(log, **changes) if f.code.startswith("AMP7")]


def scaled(scales, every=1):
    return [entry(every * (i + 1), 2.0 + i % 7 / 10, 1.0 + i % 5 / 10, s) for i, s in enumerate(scales)]


def history(*exponents, hold=30):
    """A scale that stays a while at each of these powers of two."""
    return list(itertools.chain.from_iterable([2.0**k] * hold for k in exponents))


def simulated(steps, limit, *, interval=2000, hysteresis=1, scale=2.0**16, fresh_at=None, every=1):
    """A scaler's own arithmetic against the largest scale that each step bears; DeepSpeed's hysteresis is 2."""
    start, tracker, lives, scales = scale, 0, hysteresis, []
    for step in range(steps):
        if step == fresh_at:
            scale, tracker, lives = start, 0, hysteresis
        scales.append(scale)
        if scale > limit(step):
            tracker, lives = 0, lives - 1
            scale = scale / 2 if lives <= 0 else scale
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker, lives = scale * 2, 0, hysteresis
    return scaled(scales)[::every]
