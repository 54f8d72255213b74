"""The `profile` section of a report: a view of a profile, made without running anything again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ampdoctor.evidence.ranges import GRADIENTS, RangeFigures, SiteKind
from ampdoctor.ranges.profile import FP8, RangeProfile, Shadow, figures, fitted_figures

QUANTILES = (0.001, 0.01, 0.5, 0.99)


def profile_section(profile: RangeProfile, recommended: float | None, *, sites: bool = True) -> dict[str, Any]:
    """Summary, sites, shadow steps, modules and updates.

    Summary rows: `fp16` at the run's loss scale, `fp16_recommended` at the recommended one (where there is one),
    `fp16_unscaled` at a loss scale of 1, `bf16` unscaled, `e4m3fn` and `e5m2` with each tensor scaled to fit. Only
    tensors that are in the half format count. A site has the same rows for itself.

    Args:
        profile: The profile.
        recommended: The loss scale that fits; None where none is known.
        sites: Give the sites too.
    """
    rows = _rows(profile, recommended)
    return {
        "summary": {
            row: {kind: asdict(_of_kind(profile, kind, fmt, at)) for kind in GRADIENTS}
            for row, (fmt, at) in rows.items()
        },
        "sites": [_site(profile, index, rows) for index in range(len(profile.sites))] if sites else [],
        "shadows": [_shadow(profile, shadow) for shadow in profile.shadows],
        "modules": [asdict(module) for module in profile.modules] if sites else [],
        "updates": [asdict(update) for update in profile.updates] if sites else [],
        "steps": profile.steps,
        "loss_scale": profile.run.loss_scale,
        "recommended_scale": recommended,
    }


def _rows(profile: RangeProfile, recommended: float | None) -> dict[str, tuple[str, float]]:
    rows = {"fp16": ("fp16", profile.run.loss_scale), "fp16_unscaled": ("fp16", 1.0), "bf16": ("bf16", 1.0)}
    if recommended is not None:
        rows["fp16_recommended"] = ("fp16", recommended)
    return rows | {fmt: (fmt, 1.0) for fmt in FP8}


def _of_kind(profile: RangeProfile, kind: SiteKind, fmt: str, scale: float) -> RangeFigures:
    if fmt in FP8:
        return fitted_figures(profile, profile.of_kind(kind), fmt)
    return figures(profile.merged(kind), fmt, profile.factor(kind, scale))


def _site(profile: RangeProfile, index: int, rows: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    site, histogram = profile.sites[index], profile.histograms[index]
    base = 1.0 / profile.factor(site.kind, 1.0)  # magnitudes are shown as of the unscaled loss
    return {
        **asdict(site.place),
        "half": site.half,
        "weight": site.weight,
        "order": site.order,
        "module": site.module,
        "histogram": histogram.to_dict(),
        "amax_by_step": [float(value) for value in profile.series.amax[:, index]],
        "numel": histogram.numel,
        "zeros": histogram.zeros,
        "nonfinite": histogram.nans + histogram.pos_infs + histogram.neg_infs,
        "amax": _over(histogram.amax, base),
        "amin": _over(histogram.amin, base),
        "quantiles": {f"q{q:g}": _over(histogram.quantile(q), base) for q in QUANTILES},
        "formats": {
            row: asdict(
                fitted_figures(profile, [index], fmt)
                if fmt in FP8
                else figures(histogram, fmt, profile.factor(site.kind, scale))
            )
            for row, (fmt, scale) in rows.items()
        },
    }


def _shadow(profile: RangeProfile, shadow: Shadow) -> dict[str, Any]:
    shares = {
        index: float(shadow.predicted[index]) / int(shadow.nonzero[index])
        for index in profile.of_kind("activation_grad")
        if shadow.nonzero[index]
    }
    kinds = {}
    for kind in GRADIENTS:
        chosen = profile.of_kind(kind)
        nonzero = int(shadow.nonzero[chosen].sum())
        kinds[kind] = {
            "measured": int(shadow.flushed[chosen].sum()) / nonzero if nonzero else None,
            "predicted": float(shadow.predicted[chosen].sum()) / nonzero if nonzero else None,
            "lower_bound": any(profile.lower_bound(index, shares) for index in chosen),
        }
    return {
        "scale": shadow.scale,
        "steps": list(shadow.steps),
        "flushed": kinds,
        "relative_error": {"measured": shadow.relative_error, "predicted": shadow.predicted_error},
        "sites": [
            {
                **asdict(profile.sites[index].place),
                "nonzero": int(shadow.nonzero[index]),
                "measured": int(shadow.flushed[index]) / int(shadow.nonzero[index]),
                "predicted": float(shadow.predicted[index]) / int(shadow.nonzero[index]),
                "lower_bound": profile.lower_bound(index, shares),
            }
            for index in profile.half_gradients()
            if shadow.nonzero[index]
        ],
    }


def _over(value: float | None, base: float) -> float | None:
    return None if value is None else value / base
