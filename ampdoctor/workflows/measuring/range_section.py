"""The `profile` section of a report, made from a profile without running anything again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray

from ampdoctor.evidence.of_runs.ranges import GRADIENTS, SiteKind
from ampdoctor.numerics import Histogram
from ampdoctor.ranges.profile import FP8, SURE_BELOW, RangeProfile, Shadow, figures, fitted_figures

QUANTILES = (0.001, 0.01, 0.5, 0.99)


def profile_section(profile: RangeProfile, recommended: float | None, *, sites: bool = True) -> dict[str, Any]:
    """Returns summary, sites, shadow steps, modules and updates.

    Rows of the summary: `fp16` at the run's loss scale, `fp16_recommended` at the recommended one (if there is one),
    `fp16_unscaled` at a loss scale of 1, `bf16` unscaled, `e4m3fn` and `e5m2` with each tensor scaled to fit. Only
    tensors in the half format count. Each site has the same rows.

    Args:
        profile: The profile.
        recommended: The recommended loss scale; None if none is known.
        sites: Include the sites.
    """
    rows = _rows(profile, recommended)
    return {
        "summary": {
            row: {kind: _of_kind(profile, kind, fmt, at) for kind in GRADIENTS} for row, (fmt, at) in rows.items()
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


def _of_kind(profile: RangeProfile, kind: SiteKind, fmt: str, scale: float) -> dict[str, float | None]:
    return _figures(profile, profile.of_kind(kind), profile.merged(kind), fmt, profile.factor(kind, scale))


def _figures(
    profile: RangeProfile, indices: Sequence[int], merged: Histogram, fmt: str, factor: float
) -> dict[str, float | None]:
    """Returns what a format does to these sites; None for a share of no values, which is not 0 %."""
    found = fitted_figures(profile, indices, fmt) if fmt in FP8 else figures(merged, fmt, factor)
    nothing = {} if merged.counts.any() else dict.fromkeys(("flushed", "subnormal", "overflowed", "relative_error"))
    return asdict(found) | nothing


def _site(profile: RangeProfile, index: int, rows: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    site, histogram = profile.sites[index], profile.histograms[index]
    base = 1.0 / profile.factor(site.kind, 1.0)  # magnitudes are shown as if the loss were unscaled
    return {
        **asdict(site.place),
        "half": site.half,
        "weight": site.weight,
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
            row: _figures(profile, [index], histogram, fmt, profile.factor(site.kind, scale))
            for row, (fmt, scale) in rows.items()
        },
    }


def _shadow(profile: RangeProfile, shadow: Shadow) -> dict[str, Any]:
    def share(counts: NDArray[Any], indices: Sequence[int]) -> float | None:
        nonzero = int(shadow.nonzero[indices].sum())
        return float(counts[indices].sum()) / nonzero if nonzero else None

    seen = [index for index in profile.half_gradients() if shadow.nonzero[index]]
    lossy = any(
        (share(shadow.predicted, [i]) or 0.0) > SURE_BELOW for i in seen if profile.sites[i].kind == "activation_grad"
    )

    def beside(kind: SiteKind, indices: Sequence[int]) -> dict[str, Any]:
        return {
            "measured": share(shadow.flushed, indices),
            "predicted": share(shadow.predicted, indices),
            "lower_bound": lossy and kind == "weight_grad",
        }

    return {
        "scale": shadow.scale,
        "steps": list(shadow.steps),
        "flushed": {kind: beside(kind, profile.of_kind(kind)) for kind in GRADIENTS},
        "relative_error": {"measured": shadow.relative_error, "predicted": shadow.predicted_error},
        "sites": [
            {
                **asdict(profile.sites[index].place),
                "nonzero": int(shadow.nonzero[index]),
                **beside(profile.sites[index].kind, [index]),
            }
            for index in seen
        ],
    }


def _over(value: float | None, base: float) -> float | None:
    return None if value is None else value / base
