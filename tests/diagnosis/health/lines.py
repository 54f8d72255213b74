"""Logs of made-up runs: what a healthy one looks like, and what may befall it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.evidence.log_records import DetailLine, RunLine, StepLine, TensorDetail
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS

NAMES = ("blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.1.fc.weight", "head.weight", "blocks.1.fc")


def steps(count=600, seed=0, **changed):
    """A quiet run; each change is a function of the line, by name of the field."""
    rng, batches = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    lines = []
    for at in range(count):
        line = StepLine(
            step=at,
            accepted=at,
            micro_steps=1,
            loss=float((1 + 2 * np.exp(-at / 150)) * np.exp(rng.normal(0, 0.05))),
            gradient_norm=float(0.5 * np.exp(rng.normal(0, 0.15))),
            learning_rates=(1e-3,),
            seconds=float(0.1 * np.exp(rng.normal(0, 0.1))),
            skipped=False,
            loss_scale=1024.0,
            weight_decays=(0.01,),
            batch_elements=4096,
            batch_rms=float(np.exp(batches.normal(0, 0.03))),
            batch_zero_share=float(batches.binomial(512, 0.2) / 512),
            batch_fingerprint=1000 * seed + at,
        )
        lines.append(replace(line, **{name: change(at, getattr(line, name)) for name, change in changed.items()}))
    return lines


def details(count=30, every=20, seed=0, change=lambda look, one: one):
    """Looks at three weights and a bias, each with its gradient and update, and at one module's output."""
    rng = np.random.default_rng(seed)
    lines = []
    for look in range(count):
        tensors = []
        for index in range(4):
            noise = lambda spread: float(np.exp(rng.normal(0, spread)))  # noqa: E731
            norm = (10.0, 0.2, 12.0, 8.0)[index] * (1 + 0.001 * look)
            common = {"tensor": index, "format": "fp32", "elements": 4096}
            tensors += [
                TensorDetail(role="gradient", norm=0.3 * noise(0.2), flushed_share=0.001 * noise(0.1), **common),
                TensorDetail(
                    role="parameter", norm=norm * noise(1e-5), amax=1.0, update_ratio=1e-3 * noise(0.1), **common
                ),
            ]
        room = 6 + float(rng.normal(0, 0.2))
        tensors.append(TensorDetail(tensor=4, role="activation", part="output", format="fp16", log2_headroom=room))
        lines.append(
            DetailLine(step=look * every, loss_scale=1024.0, tensors=tuple(change(look, one) for one in tensors))
        )
    return lines


def judged(lines, thresholds=DEFAULT_THRESHOLDS):
    """What a judge says of a run with these lines, in the order in which it says it."""
    judge = Judge(thresholds)
    judge.add(RunLine(name="made-up", tensors=NAMES, optimizers=("AdamW",), detail_every=20))
    return [finding for line in lines for finding in judge.add(line)]


def changed(name, index, role, value):
    """A change of one field of one tensor: `value(look, before)`."""
    return lambda look, one: (
        replace(one, **{name: value(look, getattr(one, name))}) if (one.tensor, one.role) == (index, role) else one
    )
