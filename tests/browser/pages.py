"""Reports that fill every view of the HTML page, made of real histograms and of names that try to break out of it."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch

from ampdoctor.evidence.checkpoint_stats import TensorRow
from ampdoctor.evidence.json_records import from_plain
from ampdoctor.evidence.report import BaselineSection, Check, ErrorNote, Report, Skipped, Suppressed
from ampdoctor.evidence.report_replay import PathSection, ProofSection
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.evidence.report_scan import ChangeSection, StructureSection, TrendSection
from ampdoctor.evidence.run_facts import PrecisionAdvice
from ampdoctor.numerics.counting import count
from ampdoctor.ranges.profile import figures
from tests.browser.health_pages import beside, watched
from tests.samples import OVERFLOW, UNDERFLOW, range_figures

HOSTILE = '</script><img src=x onerror="window.broken=1"><b>{a|x}</b>\u202e\x1b[31m\u2028<!--'
"""The name of a tensor or a module, as a file may have it."""
RUN_SCALE, FITTING = 2.0**16, 2.0**12
LAYERS = 30


def site(name, kind, exponent, *, part="parameter", half=True):
    """A measured place whose values lie around 2^exponent."""
    generator = torch.Generator().manual_seed(len(name) + 64 + exponent)
    values = torch.randn(4000, generator=generator) * torch.exp2(
        2.5 * torch.randn(4000, generator=generator) + exponent
    )
    histogram = count(values)
    scaled = kind.endswith("_grad")
    at = {"fp16": RUN_SCALE, "fp16_unscaled": 1.0, "fp16_recommended": FITTING, "bf16": 1.0, "e4m3fn": 1.0, "e5m2": 1.0}
    return {
        "name": name,
        "module": name.rpartition(".")[0],
        "kind": kind,
        "part": part,
        "half": half,
        "weight": 4000,
        "numel": histogram.numel,
        "zeros": histogram.zeros,
        "nonfinite": 0,
        "amax": histogram.amax,
        "amin": histogram.amin,
        "quantiles": {"q0.5": histogram.quantile(0.5)},
        "formats": {
            row: asdict(figures(histogram, row.partition("_")[0], scale if scaled else 1.0))
            for row, scale in at.items()
        },
        "amax_by_step": [histogram.amax, histogram.amax],
        "histogram": histogram.to_dict(),
    }


def sites():
    made = [site(f"blocks.{n}.mlp.weight", "weight_grad", -24 + n // 2) for n in range(LAYERS)]
    made += [site(f"blocks.{n}.mlp", "activation_grad", -30 + n // 2, part="output") for n in range(LAYERS)]
    made += [site(HOSTILE, "activation_grad", 2, part="input"), site("norm", "weight_grad", -8, half=False)]
    return [*made, site("blocks.0.mlp", "activation", 3, part="output"), site("blocks.0.mlp.weight", "weight", -5)]


def simulated(points, skips):
    return {"points": points, "skips": skips, "changes": len(points), "skipped": len(skips), "replica": 7}


SITES = sites()
SETTINGS = {"init_scale": FITTING, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 100}
PROFILED = Report(
    command="recommend",
    target={"factory": "train.py:make_run", "checkpoint": None},
    run={"device": "cpu", "policy": "cuda", "precision": "fp16", "steps": 2, "notes": [HOSTILE]},
    verdict="healthy",
    findings=(UNDERFLOW,),
    checks=(Check(name="gradients finite in fp32", result="ok", headroom={"steps": 20}),),
    scaler=from_plain(
        ScalerSection,
        {
            "current": {"scale": RUN_SCALE, "growth_interval": 2000},
            "recommended": SETTINGS,
            "change": True,
            "bound_by": HOSTILE,
            "bounds": {"init_scale": {"value": FITTING, "by": "blocks.29.mlp.weight (weight_grad)"}},
            "horizon": 1000,
            "predicted": {
                "skip_rate": 0.0,
                "flushed": {"activation_grad": 0.1, "weight_grad": 0.125},
                "relative_error": 1e-4,
            },
            "trajectory": {
                "current": simulated([[0, RUN_SCALE], [1, 32768.0], [2, 16384.0], [802, 32768.0]], [0, 1, 802]),
                "recommended": simulated([[0, FITTING], [100, 8192.0], [200, 16384.0]], []),
                "limit": [[0, 16384.0], [1, 32768.0]],
            },
        },
    ),
    profile={
        "steps": 2,
        "loss_scale": RUN_SCALE,
        "recommended_scale": FITTING,
        "shadows": [],
        "modules": [],
        "updates": [],
        "summary": {
            "fp16": {"weight_grad": range_figures(0.31, 0.2, 0.1)},
            "bf16": {"weight_grad": range_figures(0.0, 0.0, 2e-3)},
        },
        "sites": SITES,
    },
    precision=from_plain(
        PrecisionAdvice,
        {
            "target": "A100",
            "precision": "bf16",
            "why": "bf16 has the range of fp32",
            "alternative": None,
            "rows": [
                {"module": HOSTILE, "type": "Linear", "part": "", "precision": "bf16", "reason": "matrix products"}
            ],
            "remedies": ["turn the scaler off"],
            "notes": [],
        },
    ),
)


def node(order, role, module, op, amax, **more):
    known = {"phase": "forward", "type": "Linear", "dtype": "float16", "shape": [4, 16], "nan": 0, "inf": 0}
    place = {"order": order, "role": role, "module": module, "op": op, "source": {"file": "t5.py", "line": 41}}
    return {**place, "input_amax": 12.5, "output_amax": amax, **known, "limit": 65504.0, **more}


def ran(loss, *, finite=True, skipped=False):
    norm = 2.5 if finite else math.nan
    return {"loss": loss, "scale": 1024.0, "gradient_norm": norm, "skipped": skipped, "finite": finite}


FAILED = ran(math.nan, finite=False, skipped=True)


BISECTED = Report(
    command="bisect-nan",
    target={"factory": "t5.py:make_run"},
    run={"device": "cpu", "policy": "cuda", "precision": "fp16", "steps": 8},
    verdict="sick",
    findings=(OVERFLOW,),
    path=from_plain(
        PathSection,
        {
            "fingerprint": OVERFLOW.fingerprint,
            "step": 3,
            "affected": ["loss", "encoder.block.3.ff.wo.weight.grad"],
            "omitted": 4,
            "nodes": [
                node(10, "before", "encoder.block.3.ff.wi", "aten.linear", 6000.0),
                node(11, "before", "encoder.block.3.ff.act", "aten.relu", 6000.0, type="ReLU"),
                node(12, "origin", "encoder.block.3.ff.wo", "aten.linear", 65504.0, inf=3),
                node(13, "carrier", "encoder.block.3", "aten.add", 65504.0, inf=3, type="T5Block"),
                node(
                    14, "carrier", HOSTILE, "aten.rsqrt", 0.0, nan=16, type="T5LayerNorm", dtype="float32", limit=None
                ),
                node(15, "affected", "", "aten.cross_entropy_loss", 0.0, nan=1, phase="loss", shape=[], source=None),
            ],
        },
    ),
    proof=from_plain(
        ProofSection,
        {
            "fingerprint": OVERFLOW.fingerprint,
            "kind": "fp32_modules",
            "value": ["encoder.block.3.ff.wo"],
            "status": "verified",
            "omitted": 2,
            "steps": [
                {"step": 3, "without": FAILED, "with": ran(2.41), "fp32": ran(2.409)},
                {"step": 4, "without": FAILED, "with": ran(2.3), "fp32": ran(2.301)},
                {"step": 5, "without": None, "with": ran(2.12), "fp32": ran(2.119)},
            ],
        },
    ),
    suppressed=(Suppressed(finding=UNDERFLOW, by="ignore", reason="known since v1"),),
    baseline=from_plain(
        BaselineSection,
        {
            "file": "baseline.json",
            "new": 1,
            "written": False,
            "known": 0,
            "fixed": [
                {
                    "fingerprint": "0" * 16,
                    "code": "AMP101",
                    "severity": "error",
                    "module": "",
                    "op": None,
                    "tensor": HOSTILE,
                    "file": None,
                    "message": "NaN in a weight",
                }
            ],
        },
    ),
    checks=(Check(name="finite gradients", result="found"),),
    skipped=(Skipped(what="extra.bin", reason="a Git LFS pointer"),),
    errors=(ErrorNote(what=HOSTILE, kind="truncated", message="the file ends early"),),
    complete=False,
)


def tensor(index):
    role = ("weight", "moment", "buffer")[index % 3]
    amax = 2.0 ** (index % 40 - 20)
    shares = {"flushed": (index % 7) / 10, "subnormal": 0.1, "overflowed": 1.0 if amax > 65504 else 0.0}
    module, size = f"model.layers.{index // 10}.part{index % 10}", 16 * (index + 1)
    counted = {"zeros": index, "nan": 3 if index == 7 else 0, "inf": 0, "at_max": 0}
    row = {
        "name": HOSTILE if index == 5 else f"{module}.weight",
        "role": role, "entry": "exp_avg" if role == "moment" else "", "module": module, "group": "",
        "file": "model.safetensors", "dtype": "float16" if index % 2 else "float32", "shape": [16, index + 1],
        "examined": size, "counted": size, **counted, "amax": amax, "amin": amax / 2.0 ** (index % 11),
        "fp16": shares, "bf16": {"flushed": 0.0, "subnormal": 0.0, "overflowed": 0.0},
    }  # fmt: skip
    return from_plain(TensorRow, row)


def scanned(tensors=10_000):
    return Report(
        command="scan",
        target={"path": "model.safetensors", "format": "safetensors"},
        verdict="healthy",
        checks=(Check(name="finite weights", result="ok", headroom={"log2": 7.5}),),
        tensors=tuple(tensor(index) for index in range(tensors)),
    )


def point(step, scale, loss, amax):
    roles = {
        "weight": {"amax": amax, "fp16_flushed": 0.01 * step / 1000},
        "moment": {"amax": amax / 100, "fp16_flushed": 0.5},
    }
    return {"name": f"step-{step}", "step": step, "scale": scale, "loss": loss, "roles": roles}


def side(step, scale):
    return {"path": f"run/step-{step}", "global_step": step, "scale": scale}


GREW = {"relative_change": 0.5, "amax": 60000.0, "old_amax": 4.0}
CHANGED = {
    "role": "weight", "entry": "", "dtype": "float16", "old_dtype": "float32", "shape": [4, 8],
    **GREW, "nonfinite": 0, "old_nonfinite": 0,
}  # fmt: skip
FOLLOWED = Report(
    command="scan",
    target={
        "path": "run",
        "members": [{"name": f"step-{n}000", "step": n * 1000, "verdict": "healthy"} for n in (1, 2)],
    },
    verdict="healthy",
    findings=(UNDERFLOW,),
    trend=from_plain(
        TrendSection,
        {
            "unit": "step",
            "summary": "step-3000 is the first sick one",
            "first_sick": "step-3000",
            "last_healthy": "step-2000",
            "monotone": True,
            "points": [
                point(1000, 65536.0, 2.5, 4.0),
                point(2000, 16384.0, 2.25, 900.0),
                point(3000, 1.0, math.nan, 60000.0),
            ],
        },
    ),
    change=from_plain(
        ChangeSection,
        {
            "old": side(1000, 65536.0),
            "new": side(3000, 1.0),
            "steps": 2000,
            "roles": {"weight": {"tensors": 2, "elements": 64, "unchanged": 0.25, **GREW}},
            "growth": [
                {
                    "tensor": HOSTILE,
                    "old_amax": 4.0,
                    "amax": 60000.0,
                    "log2_growth": 13.9,
                    "intervals": 0.01,
                    "meets_at": 3018,
                }
            ],
            "tensors": [
                {**CHANGED, "name": name, "unchanged": share} for name, share in (("head.weight", 0.5), (HOSTILE, 0.0))
            ],
            "appeared": ["new.weight"],
            "vanished": [],
            "reshaped": {"emb.weight": [[4, 4], [8, 4]]},
        },
    ),
)
STORED = {
    "role": "weight", "group": "", "entry": "", "dtype": "float16", "shape": [2, 3], "bytes": 12, "file": "model.pt",
}  # fmt: skip
LISTED = Report(
    command="scan",
    target={
        "path": "model.pt",
        "format": "torch zip",
        "bytes": 1_250_000,
        "files": [{"path": "model.pt", "bytes": 1_250_000}],
        "global_step": 7,
    },
    verdict="not_judged",
    structure=from_plain(
        StructureSection,
        {
            "tensors": [{**STORED, "name": name} for name in ("a.weight", HOSTILE)],
            "roles": {"weight": {"tensors": 2, "elements": 12, "bytes": 24, "dtypes": {"float16": 2}}},
            "optimizers": [{"path": "", "parameters": 2, "groups": [{"parameters": 2, "settings": {"lr": 1e-3}}]}],
            "scalers": [{"key": "scaler", "file": "model.pt", "scale": 1024.0}],
            "unsafe_globals": ["os.system"],
            "log": {"entries": 3, "first_step": 0, "last_step": 20},
            "members": [],
        },
    ),
)
EVERY_VIEW = {
    "profiled": PROFILED,
    "bisected": BISECTED,
    "scanned": scanned(50),
    "followed": FOLLOWED,
    "listed": LISTED,
    "watched": watched(f"h.#.{HOSTILE}"),
    "beside": beside(HOSTILE),
}
