"""Does a profile that was read agree with itself? Its figures by step and its totals are of the same tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ampdoctor.errors import UsageError
from ampdoctor.evidence.of_runs.ranges import Site
from ampdoctor.numerics import Histogram
from ampdoctor.numerics.tally import BEYOND_FP32, EDGES
from ampdoctor.ranges.profile import RangeProfile

Array = NDArray[np.float64]

_ROUNDING = 1e-6
"""Sums of float64 taken in another order differ by far less."""
_LARGEST_ERROR = 2.0
"""A value that is rounded loses at most all of itself; binwise estimates of error and square are apart by less."""
_LARGEST_TOTAL = 2**58
"""Elements of all sites and steps: sums over sites, and over some profiles, stay inside int64."""
_LARGEST_LOSS = 2.0**128
_SQUARES = EDGES[: BEYOND_FP32 + 1] ** 2


def require_consistent(profile: RangeProfile) -> None:
    """Refuse a profile that no run has, whose numbers are each fine by themselves.

    Raises:
        UsageError: Steps and totals contradict each other, or a part is larger than its whole.
    """
    with np.errstate(over="ignore"):  # what overflows is compared as inf, and refused
        present = np.array([histogram.counts.sum(dtype=np.float64) for histogram in profile.histograms])
        numel = np.array([float(histogram.numel) for histogram in profile.histograms])
        if numel.sum() > _LARGEST_TOTAL:
            raise UsageError("its histograms count more elements than any run has")
        for index, (site, histogram) in enumerate(zip(profile.sites, profile.histograms, strict=True)):
            _require_maxima(site, histogram, profile.series.amax[:, index])
            _require_squares(site, histogram, float(profile.square_sums[index]))
        _require_steps(profile, present)
        _require_fp8(profile, present)
        _require_shadows(profile, numel)
    loss = profile.run.loss_amax
    if loss is not None and not 0.0 <= loss < _LARGEST_LOSS:
        raise UsageError(f"its loss_amax is {loss:g}, not the magnitude of a loss")


def _require_maxima(site: Site, histogram: Histogram, amax: Array) -> None:
    finite = amax[np.isfinite(amax) & (amax > 0.0)]
    if finite.size and not (histogram.amin or np.inf) <= finite.min() <= finite.max() <= (histogram.amax or 0.0):
        raise UsageError(f"{site.label}: a step's largest magnitude is not among those of its histogram")
    nonfinite = histogram.nans + histogram.pos_infs + histogram.neg_infs > 0
    if np.isinf(amax).any() and not (site.kind == "weight_grad" and nonfinite):
        raise UsageError(f"{site.label}: a step's largest magnitude is infinite, and no element is")


def _require_squares(site: Site, histogram: Histogram, total: float) -> None:
    counts = histogram.counts.reshape(-1)[:BEYOND_FP32].astype(np.float64)  # beyond it squares are not summed
    least, most = float(counts @ _SQUARES[:-1]), float(counts @ _SQUARES[1:])
    if not least * (1.0 - _ROUNDING) <= total <= most * (1.0 + _ROUNDING):
        raise UsageError(f"{site.label}: its sum of squares is not that of its histogram")


def _require_steps(profile: RangeProfile, present: Array) -> None:
    series, gradients = profile.series, profile.gradients
    if (series.nonzero > present[:gradients]).any() or (series.nonzero.sum(0, np.float64) != present[:gradients]).any():
        raise UsageError("the nonzero elements of its steps do not add up to those of its histograms")
    if not np.allclose(series.power.sum(axis=0), profile.square_sums[:gradients], rtol=_ROUNDING, atol=0.0):
        raise UsageError("the powers of its steps do not add up to its sums of squares")
    if (series.error > _LARGEST_ERROR).any():
        raise UsageError("a gradient error in it is larger than the gradient")


def _require_fp8(profile: RangeProfile, present: Array) -> None:
    flushed, subnormal, error = np.moveaxis(profile.fp8, -1, 0)  # each of shape (k, 2)
    if (flushed + subnormal > present[:, None] * (1.0 + _ROUNDING)).any():
        raise UsageError("more elements flush in an 8-bit format than its histograms have")
    if (error > _LARGEST_ERROR**2 * (1.0 + _ROUNDING) * profile.square_sums[:, None]).any():
        raise UsageError("an 8-bit format loses more in it than there is")


def _require_shadows(profile: RangeProfile, numel: Array) -> None:
    # Elements and not nonzero ones are the bound: values that are not finite count as nonzero here, and on a device
    # the fp32 step that a shadow was compared with may differ from the measured one in its last bits.
    most = numel[: profile.gradients]
    for shadow in profile.shadows:
        whole = (shadow.flushed <= shadow.nonzero) & (shadow.nonzero <= most)
        if not (whole & (shadow.predicted <= most * (1.0 + _ROUNDING))).all():
            raise UsageError("a shadow in it counts more elements than its histograms have")
