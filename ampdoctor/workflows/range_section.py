"""The `profile` section of a report, from what was measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ampdoctor.evidence.ranges import site_entry
from ampdoctor.scaling.measured import GRADIENTS, Measured, MeasuredSite, figures

QUANTILES = (0.001, 0.01, 0.5, 0.99)


def profile_section(measured: Measured, *, sites: bool = True) -> dict[str, Any]:
    """Summary, sites and what `recommend` needs to go on from the file.

    Summary rows: `fp16` at the run's loss scale, `fp16_unscaled` at a loss scale of 1, `bf16` unscaled; only tensors
    that are in the half format count. A site has the same figures for itself.

    Args:
        measured: The profile.
        sites: Give the sites too; not where they were just read from the file in which they are.
    """
    scale = measured.profile.loss_scale
    summary = {
        row: {kind: asdict(figures(measured.merged(kind), fmt, measured.factor(kind, at))) for kind in GRADIENTS}
        for row, fmt, at in _rows(scale)
    }
    return {
        "summary": summary,
        "sites": [_site(measured, m) for m in measured.sites] if sites else [],
        "measured": measured.profile.to_dict(),
    }


def _rows(scale: float) -> tuple[tuple[str, str, float], ...]:
    return ("fp16", "fp16", scale), ("fp16_unscaled", "fp16", 1.0), ("bf16", "bf16", 1.0)


def _site(measured: Measured, m: MeasuredSite) -> dict[str, Any]:
    histogram, kind = m.histogram, m.site.kind
    base = 1.0 / measured.factor(kind, 1.0)  # magnitudes are shown as of the unscaled loss
    ranges = {
        row: asdict(figures(histogram, fmt, measured.factor(kind, at)))
        for row, fmt, at in _rows(measured.profile.loss_scale)
    }
    quantiles = {f"q{q:g}": histogram.quantile(q) for q in QUANTILES}
    return {
        **site_entry(m.site),
        "module": m.site.module,
        "numel": histogram.numel,
        "zeros": histogram.zeros,
        "nonfinite": histogram.nans + histogram.pos_infs + histogram.neg_infs,
        "amax": _over(histogram.amax, base),
        "amin": _over(histogram.amin, base),
        "quantiles": {name: _over(value, base) for name, value in quantiles.items()},
        "formats": ranges,
    }


def _over(value: float | None, base: float) -> float | None:
    return None if value is None else value / base
