"""A range profile made ready for questions: which share flushes, overflows or is rounded away at which loss scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

from ampdoctor.errors import UsageError
from ampdoctor.evidence.ranges import RangeFigures, RangeProfile, SiteKind, SiteRange
from ampdoctor.numerics import Histogram

GRADIENTS: tuple[SiteKind, ...] = ("activation_grad", "weight_grad")


@dataclass(frozen=True, slots=True)
class MeasuredSite:
    """A site with its histogram read."""

    site: SiteRange
    histogram: Histogram


class Measured:
    """The sites of a profile with their histograms.

    Scales are those of the loss as the user multiplies it: a factor that the measured gradients already carry
    (`RangeProfile.base_scale`) is divided out here and nowhere else.

    Args:
        profile: What was measured.

    Raises:
        UsageError: A histogram in it cannot be read.
    """

    def __init__(self, profile: RangeProfile) -> None:
        self.profile = profile
        self.sites = tuple(MeasuredSite(site, _histogram(site)) for site in profile.sites)

    def half_gradients(self, without: Collection[str] = ()) -> tuple[MeasuredSite, ...]:
        """Gradients that are in the half format, but for those of the modules `without` (fp32 islands)."""
        return tuple(m for m in self.sites if m.site.half and m.site.kind in GRADIENTS and m.site.module not in without)

    def merged(self, kind: SiteKind, without: Collection[str] = ()) -> Histogram:
        """All sites of a kind that are in the half format, together."""
        histograms = [
            m.histogram for m in self.sites if m.site.kind == kind and m.site.half and m.site.module not in without
        ]
        return functools.reduce(Histogram.__add__, histograms, Histogram.empty())

    def factor(self, kind: SiteKind, scale: float) -> float:
        """What a histogram of this kind is multiplied by at a loss scale: activations and weights are not scaled."""
        return scale / self.profile.base_scale if kind in GRADIENTS else 1.0

    def trace(self, without: Collection[str] = ()) -> list[float | None]:
        """Largest magnitude of the unscaled half gradients of each step; inf where one was not finite."""
        series = [m.site.amax_by_step for m in self.half_gradients(without)]
        result: list[float | None] = []
        for step in range(self.profile.steps):
            seen = [s[step] for s in series if step < len(s)]
            present = [value for value in seen if value is not None]
            result.append(max(present) / self.profile.base_scale if present else None)
        return result

    def log2_series(self, site: SiteRange) -> list[float]:
        """log2 of the site's largest unscaled magnitude, of the steps that have a finite nonzero one."""
        base = math.log2(self.profile.base_scale)
        return [math.log2(v) - base for v in site.amax_by_step if v is not None and 0.0 < v < math.inf]


def figures(histogram: Histogram, fmt: str, factor: float) -> RangeFigures:
    """What a format would do to the values times `factor`."""
    numel = histogram.numel
    return RangeFigures(
        flushed=histogram.flushed(fmt, factor),
        subnormal=histogram.subnormal(fmt, factor),
        overflowed=histogram.overflowed(fmt, factor),
        relative_error=histogram.relative_error(fmt, factor),
        zeros=histogram.zeros / numel if numel else 0.0,
    )


def _histogram(site: SiteRange) -> Histogram:
    try:
        return Histogram.from_dict(site.histogram)
    except UsageError as error:
        raise UsageError(f"the profile's {site.label}: {error}") from None
