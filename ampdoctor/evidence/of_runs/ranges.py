"""The terms of a range profile: what a measured place is, and what a format does to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SiteKind = Literal["activation_grad", "weight_grad", "activation", "weight"]
SitePart = Literal["output", "input", "parameter"]

KINDS: tuple[SiteKind, ...] = ("activation_grad", "weight_grad", "activation", "weight")
"""The kinds in the order of a profile: gradients, which have curves by loss scale, come first."""
GRADIENTS: tuple[SiteKind, ...] = ("activation_grad", "weight_grad")

PROFILE_MARK = "ampdoctor_profile"
"""Key in the header of a saved profile; it distinguishes a profile from a checkpoint, which may be safetensors, too."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""Formats that a run may compute in (`precision.Compute`, which this room cannot see)."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place of measurement.

    Attributes:
        name: Name of the module as in `named_modules()` ("" is the model itself), or of the parameter.
        kind: What is measured.
        part: `output` or `input` of the module; `parameter` for weights and their gradients.
    """

    name: str
    kind: SiteKind
    part: SitePart

    @property
    def module(self) -> str:
        """The place's module: the owner of a parameter."""
        return self.name.rpartition(".")[0] if self.part == "parameter" else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One measured place, all steps and calls together.

    Attributes:
        place: The place.
        half: In the half-precision run this tensor has, or passes through, the half format; only such places count in
            a summary. What autocast keeps in fp32 (layer norms, losses) cannot flush.
        weight: Number of the module's parameter elements, at least 1: the cost of keeping it in fp32.
    """

    place: Place
    half: bool
    weight: int

    @property
    def kind(self) -> SiteKind:
        """What was measured."""
        return self.place.kind

    @property
    def module(self) -> str:
        """The place's module: the owner of a parameter."""
        return self.place.module

    @property
    def label(self) -> str:
        """Its name in a sentence: "head.output (activation_grad)"."""
        place = self.place
        named = place.name if place.part == "parameter" else f"{place.name or 'model'}.{place.part}"
        return f"{named} ({place.kind})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFigures:
    """What a format does to a set of values at some loss scale.

    Attributes:
        flushed: Fraction of the nonzero finite values that becomes zero.
        subnormal: Fraction that keeps fewer bits than a normal number.
        overflowed: Fraction that the format cannot hold.
        relative_error: L2 norm of the rounding error over that of the values; inf with an overflow.
        zeros: Fraction of all values that are zero from the start, which is not underflow.
    """

    flushed: float
    subnormal: float
    overflowed: float
    relative_error: float
    zeros: float
