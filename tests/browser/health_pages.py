"""Sections of health over time as a log of a long run makes them: drawn from a seed, with what such runs show."""

from __future__ import annotations

import numpy as np

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.evidence.report_health import (
    ActionMark,
    CheckpointMark,
    Curve,
    HealthAxis,
    HealthRun,
    HealthSection,
    HeatMap,
    LookMark,
    ScalerHistory,
)
from ampdoctor.evidence.report_scaler import ScalePath, ScalerArguments

HARM = 0.86
"""Where in a run that breaks its gradients jump, as a share of its steps."""


def health_run(
    name="gpt2-fp16",
    *,
    seed=0,
    spans=400,
    width=25,
    tensors=24,
    columns=80,
    breaks=True,
    tensor_name="transformer.h.#.attn.c_attn.weight",
    scalers=True,
):
    """A run of `spans` times `width` steps: loss falls, the scale grows, and late on the gradients jump."""
    draw = np.random.default_rng(seed)
    at = (np.arange(spans) + 0.5) / spans
    last = np.arange(1, spans + 1) * width - 1
    broken = (at > HARM) & breaks
    loss = 7.0 * np.exp(-4.0 * at) + 2.2 + np.where(broken, 3.0 * (at - HARM) / (1 - HARM), 0.0)
    norm = np.exp(0.3 * draw.standard_normal(spans)) * (0.4 + 2.0 * np.exp(-20 * at)) * np.where(broken, 40.0, 1.0)
    exponent = np.minimum(16 + (at * 6).astype(int), 20) - np.where(broken, ((at - HARM) * 60).astype(int), 0)
    scale = 2.0**exponent
    skipped = (draw.random(spans) < np.where(broken, 0.6, 0.01)).astype(int)
    nonfinite = np.where(broken & (at > 0.97), width, 0) + skipped
    seconds = 0.31 * np.exp(0.05 * draw.standard_normal(spans))
    gone = at > 0.985
    data = seconds * np.clip(0.08 + 0.05 * draw.standard_normal(spans), 0.01, 0.9)

    def curve(kind, middle, spread, *, missing=None, bad=None):
        low, high = middle * (1 - spread), middle * (1 + spread * (1 + draw.random(spans)))
        missing = np.zeros(spans, bool) if missing is None else missing

        def column(values):
            return tuple(None if absent else float(v) for v, absent in zip(values, missing, strict=True))

        return Curve(
            name=kind,
            low=column(low),
            middle=column(middle),
            high=column(high),
            p99=column(high * 0.97) if kind == "step_seconds" else None,
            nonfinite=tuple(int(n) for n in bad) if bad is not None and breaks else None,
        )

    curves = (
        curve("loss", loss + 0.02 * draw.standard_normal(spans), 0.03, missing=gone & breaks, bad=nonfinite),
        curve("gradient_norm", norm, 0.4, missing=gone & breaks, bad=nonfinite),
        curve("clipped_norm", np.minimum(norm, 1.0), 0.0),
        curve("loss_scale", scale, 0.0),
        curve("learning_rate", 6e-4 * np.minimum(at / 0.05, 0.5 * (1 + np.cos(np.pi * at))), 0.0),
        curve("log2_headroom", np.where(broken, 0.4, 6.0) + 0.6 * draw.standard_normal(spans), 0.1),
        curve("step_seconds", seconds, 0.1),
        curve("data_seconds", data, 0.4),
        curve("samples_per_second", 512 / seconds, 0.05),
        curve("tokens_per_second", 524288 / seconds, 0.05),
        curve("memory_bytes", 31e9 + 2e9 * at, 0.0),
    )
    rows = tuple(tensor_name.replace("#", str(n)) for n in range(tensors))
    steps = tuple(int(s) for s in np.linspace(0, last[-1], columns))
    when = np.linspace(0, 1, columns)
    depth = np.arange(tensors)[:, None] / tensors
    late = np.clip((when - 0.6) / 0.4, 0, 1) * (depth < 0.3) * breaks
    noise = np.exp(0.2 * draw.standard_normal((tensors, columns)))

    def grid(kind, values):
        return HeatMap(
            name=kind, role="gradient", steps=steps, tensors=rows, of=tensors + 126,
            values=tuple(tuple(None if np.isnan(v) else float(v) for v in row) for row in values),
        )  # fmt: skip

    norms = 10.0 ** (-2 - 2 * depth + 1.5 * late) * noise
    norms[tensors // 2, : columns // 5] = np.nan
    maps = (
        grid("norm", norms),
        grid("amax", norms / 7),
        grid("zero_share", np.clip(0.02 * noise + 0.3 * late, 0, 1)),
        grid("flushed_share", np.clip(1e-4 * noise * (1 + 3000 * late), 0, 1)),
        grid("log2_headroom", 6 + 4 * depth - 8 * late + noise),
        grid("update_ratio", 1e-3 * noise * (1 + 10 * late)),
    )
    return HealthRun(
        name=name, source=f"runs/{name}", format="ampdoctor", ending="ended" if breaks else "running",
        exit_code=1 if breaks else None, precision="fp16", steps=int(last[-1]) + 1, skipped=int(skipped.sum()),
        last_step=int(last[-1]), lost=3 if breaks else 0, skip_share=float(skipped.sum() / (last[-1] + 1)),
        axis=HealthAxis(
            first=tuple(int(n) - width + 1 for n in last), last=tuple(int(n) for n in last),
            samples=tuple(int(n + 1) * 512 for n in last), tokens=tuple(int(n + 1) * 524288 for n in last),
            time_ms=tuple(1_790_000_000_000 + int(310 * n) for n in last), skipped=tuple(int(n) for n in skipped),
        ),
        curves=curves, maps=maps, scalers=(scaler_history(last, scale, skipped),) if scalers else (),
        checkpoints=checkpoints(last, breaks), looks=(look(last),) if breaks else (),
        actions=(ActionMark(step=int(last[-1]), action="stop", reason="the loss is not finite"),) if breaks else (),
    )  # fmt: skip


def scaler_history(last, scale, skipped):
    starts = np.concatenate([[0], np.flatnonzero(np.diff(scale)) + 1])
    settings = ScalerArguments(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
    return ScalerHistory(
        path=ScalePath(
            points=tuple((float(last[n]), float(scale[n])) for n in starts),
            changes=len(starts),
            skips=tuple(int(last[n]) for n in np.flatnonzero(skipped)),
            skipped=int(skipped.sum()),
            replica=0,
        ),
        growths=int((np.diff(scale) > 0).sum()), backoffs=int((np.diff(scale) < 0).sum()), growth_tracker=17,
        arguments=settings,
    )  # fmt: skip


def checkpoints(last, breaks):
    at = [int(last[int(share * (len(last) - 1))]) for share in (0.2, 0.4, 0.6, 0.8, 0.9, 0.99)]
    health = ("good", "good", "good", "good", "sick", "finite") if breaks else ("good",) * 5 + ("probation",)
    return tuple(
        CheckpointMark(step=step, path=f"step-{step}.pt", health=word, reason="" if word == "good" else "NaN after it")
        for step, word in zip(at, health, strict=True)
    )


def look(last):
    step = int(last[int(0.97 * (len(last) - 1))])
    return LookMark(
        step=step,
        verdict="sick",
        says="an overflow is born in transformer.h.3.mlp",
        bundle=f"runs/gpt2-fp16/bundles/step-{step}",
        command=f"ampdoctor bisect-nan runs/gpt2-fp16/bundles/step-{step}",
    )


def alert(run, share, severity="warning", code="AMP721", *, tensor=None, message=None):
    step = round(share * run.last_step)
    return Finding(
        code=code, name="gradient-norm-jump", severity=severity,
        message=message or f"The gradient norm is 40 times its median from step {step} on; it moved first.",
        where=Where(step=step, phase="backward", tensor=tensor, file=run.source),
        evidence={"median": 0.41, "now": 16.4, "z": 9.3}, help="Look at the batch of this step.",
    )  # fmt: skip


def health_report(*runs, findings=(), **section):
    return Report(
        command="health",
        target={"path": runs[0].source},
        verdict="sick" if any(f.severity == "error" for f in findings) else "healthy",
        findings=tuple(findings),
        health=HealthSection(runs=runs, detail_every=100, **section),
    )


def watched(tensor_name="transformer.h.#.attn.c_attn.weight"):
    run = health_run(tensor_name=tensor_name)
    first = tensor_name.replace("#", "3")
    return health_report(
        run,
        findings=(
            alert(run, 0.97, "error", "AMP725", message="The loss is not finite from here on."),
            alert(run, HARM, tensor=first),
            alert(run, 0.6, "note", "AMP723", message="The zero share rises: 5 % in about 900 steps.", tensor=first),
        ),
    )


def beside(name="gpt2-fp16-clipped"):
    sick = health_run(seed=1)
    well = health_run("gpt2-bf16-with-a-long-name", seed=2, breaks=False, scalers=False, spans=300)
    third = health_run(name, seed=3, breaks=False)
    return health_report(sick, well, third, findings=(alert(sick, HARM),), axis="tokens")
