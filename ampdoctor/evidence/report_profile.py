"""The section `profile` of a report: measured ranges, and what formats make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from ampdoctor.evidence.json_records import Count, Fraction, Hexadecimal, Positive, Shape, form
from ampdoctor.evidence.run_facts import ModuleFacts, SiteKind, SitePart, UpdateFacts

Bin = Annotated[int, form(minimum=0, maximum=4095)]
Elements = Annotated[int, form(minimum=1, maximum=2**63 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatShares:
    """What a format does to values.

    Attributes:
        flushed: Share of what is not zero that becomes zero.
        subnormal: Share that keeps fewer bits.
        overflowed: Share that does not fit.
        relative_error: Relative error of rounding.
        zeros: Fraction of all values that are zero to begin with.
    """

    flushed: Fraction | None
    subnormal: Fraction | None
    overflowed: Fraction | None
    relative_error: float | None
    zeros: Fraction | None


class HistogramValues(TypedDict):
    """What `numerics.Histogram.to_dict()` gives.

    Attributes:
        bins: Numbers of the occupied bins, ascending.
        counts: Elements in each of them.
        amax: Largest finite magnitude, as counted.
        amin: Smallest nonzero magnitude, as counted.
        min_spacing: Spacing of the subnormal numbers of the format that the values came in.
        significand_bits: Of that format, the implicit one among them.
    """

    bins: Sequence[Bin]
    counts: Sequence[Elements]
    amax: Hexadecimal | None
    amin: Hexadecimal | None
    min_spacing: Hexadecimal
    significand_bits: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSection:
    """One measured place.

    Attributes:
        name: Of the module or the parameter; empty for the model itself.
        module: The module that it belongs to, as in named_modules().
        kind: What is measured there.
        part: Which end of the module, or one of its parameters.
        half: The tensor has, or passes through, the half format in the half-precision run.
        weight: Parameter elements of the module, at least 1.
        numel: Elements that were counted, over all recorded steps.
        zeros: Those that are exactly zero.
        nonfinite: Those that are NaN or infinite.
        amax: Largest finite magnitude, of the unscaled loss.
        amin: Smallest nonzero magnitude, of the unscaled loss.
        quantiles: Magnitudes that a share of the nonzero values does not exceed.
        formats: As in the summary, for this place.
        amax_by_step: As measured, a hand-made loss scale included; 0 where there was no nonzero value.
        histogram: numerics.Histogram.to_dict(): of each occupied bin its number and the elements in it; floats
            are hexadecimal.
    """

    name: str
    module: str
    kind: SiteKind
    part: SitePart
    half: bool
    weight: Positive
    numel: Count
    zeros: Count
    nonfinite: Count
    amax: float | None
    amin: float | None
    quantiles: Mapping[str, float | None]
    formats: Mapping[str, FormatShares]
    amax_by_step: tuple[float | None, ...]
    histogram: Annotated[Mapping[str, Any], Shape(HistogramValues)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedShare:
    """A share that flushes, measured beside predicted.

    Attributes:
        measured: In the half-precision steps.
        predicted: By the fp32 histograms of the same steps.
        lower_bound: The prediction is only a lower bound: activation gradients that it is made of flush.
    """

    measured: Fraction | None
    predicted: Fraction | None
    lower_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowFlushed:
    """Shares of the nonzero half gradients that became zero.

    Attributes:
        activation_grad: Of activations.
        weight_grad: Of weights.
    """

    activation_grad: FlushedShare
    weight_grad: FlushedShare


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowError:
    """The error of all weight gradients, L2.

    Attributes:
        measured: The median over the steps; Infinity where one was not finite, None where nothing could be
            compared.
        predicted: From the fp32 histograms alone.
    """

    measured: float | None
    predicted: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSite:
    """One place in half-precision steps.

    Attributes:
        name: As in site.
        kind: As in site.
        part: As in site.
        nonzero: Elements that are not zero in fp32.
        measured: Their share that was flushed.
        predicted: What the fp32 histograms say of it.
        lower_bound: The prediction is only a lower bound.
    """

    name: str
    kind: str
    part: str
    nonzero: int
    measured: Fraction
    predicted: Fraction
    lower_bound: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSection:
    """Half-precision steps at one loss scale.

    Attributes:
        scale: Loss scale of the half-precision steps.
        steps: Which steps, along the fp32 run.
        flushed: Shares of the nonzero half gradients that became zero in the half-precision step and are so
            small that the range did it.
        relative_error: Of all weight gradients, L2; predicted: of rounding each once.
        sites: The places whose gradients pass through the half format.
    """

    scale: float
    steps: tuple[Count, ...]
    flushed: ShadowFlushed
    relative_error: ShadowError
    sites: tuple[ShadowSite, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSection:
    """The ranges of a run, and what formats make of them.

    Attributes:
        summary: By format, then by kind of tensor; tensors in the half format only. fp16 at the run's loss
            scale, fp16_recommended at the recommended one, fp16_unscaled at 1; bf16; e4m3fn and e5m2 with each
            tensor scaled to fit.
        sites: One entry a measured place.
        steps: Steps that were measured.
        loss_scale: The run's own.
        recommended_scale: The largest one at which no gradient is expected to overflow; None where there is
            nothing to scale.
        shadows: Half-precision steps on the state of fp32 ones: measured beside predicted.
        modules: What ran in each module of the half-precision step.
        updates: What the optimizer's updates would do to bf16 weights.
    """

    summary: Mapping[str, Mapping[str, FormatShares]]
    sites: tuple[SiteSection, ...]
    steps: Count
    loss_scale: float
    recommended_scale: float | None
    shadows: tuple[ShadowSection, ...]
    modules: tuple[ModuleFacts, ...]
    updates: tuple[UpdateFacts, ...]
