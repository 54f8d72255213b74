"""A profile in words and figures: the formats, and the layers that lose most; the same in every report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ampdoctor.reports.words import words

KINDS: Mapping[str, str] = {"activation_grad": "dA", "weight_grad": "dW", "activation": "A", "weight": "W"}
GRADIENTS = ("activation_grad", "weight_grad")
ABOUT = "(dA: of activations, dW: of weights)"
SUMMARY_HEADINGS = ("format", "", "flushed", "subnormal", "overflow", "error")
LAYER_HEADINGS = ("", "fp16", "measured", "fits", "e5m2")
NOT_MEASURED = "not measured: no gradient of a half tensor is finite and nonzero"
FEW = 12
"""Number of layers that are shown unless all are: those that lose most."""
_ROWS = ("fp16", "fp16_recommended", "fp16_unscaled", "bf16", "e4m3fn", "e5m2")

Site: TypeAlias = Mapping[str, Any]
Place: TypeAlias = tuple[str, str, str]


def measured_gradients(profile: Mapping[str, Any]) -> bool:
    """Tell whether any gradient had a value to measure."""
    rows = (profile.get("summary") or {}).values()
    return any(figures.get("flushed") is not None for kinds in rows for figures in kinds.values())


def summary_rows(profile: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows below SUMMARY_HEADINGS; a format is named once, beside its first kind."""
    summary = profile.get("summary") or {}
    scales = {
        "fp16": words.binary(profile.get("loss_scale")),
        "fp16_recommended": f"{words.binary(profile.get('recommended_scale'))} (fits)",
        "fp16_unscaled": "1",
    }
    rows = []
    for name in sorted(summary, key=lambda n: (_ROWS.index(n) if n in _ROWS else len(_ROWS), n)):
        title = f"fp16 at {scales[name]}" if name in scales else name.replace("_", " ")
        for index, (kind, figures) in enumerate(summary[name].items()):
            shares = [words.percent(figures.get(key)) for key in ("flushed", "subnormal", "overflowed")]
            error = words.short(figures.get("relative_error"))
            rows.append(["" if index else title, KINDS.get(kind, kind.replace("_", " ")), *shares, error])
    return rows


def half_sites(profile: Mapping[str, Any]) -> list[Site]:
    """Return the places in half precision with at least one counted magnitude."""
    sites = (site for site in profile.get("sites") or () if site.get("half"))
    return [site for site in sites if (site.get("histogram") or {}).get("bins")]


def measured_of(profile: Mapping[str, Any]) -> dict[Place, float]:
    """Return what really flushed at the run's own loss scale, by place."""
    shadows = [s for s in profile.get("shadows") or () if s["scale"] == profile.get("loss_scale")]
    return {_place(site): site["measured"] for shadow in shadows for site in shadow["sites"]}


def worst_first(sites: Sequence[Site], measured: Mapping[Place, float]) -> list[Site]:
    """Return the places, those that lose most first."""

    def loss(site: Site) -> tuple[float, float, str, str]:
        """Returns the measured loss if there is one: the flushed gradient of a bias may be noise that cancels."""
        here = _flushed(site, "fp16") or 0.0
        return -measured.get(_place(site), here), -here, site["name"], site["kind"]

    return sorted(sites, key=loss)


def layer_name(site: Site) -> str:
    """Return a place's name for people, not yet sanitised."""
    return (site["name"] or "model") + (".input" if site["part"] == "input" else "")


def layer_cells(site: Site, measured: Mapping[Place, float]) -> list[str]:
    """Return the cells below LAYER_HEADINGS: shares flushed in fp16, measured, at the fitting scale, and in e5m2."""
    shares = [
        _flushed(site, "fp16"),
        measured.get(_place(site)),
        _flushed(site, "fp16_recommended"),
        _flushed(site, "e5m2"),
    ]
    return [KINDS.get(site["kind"], site["kind"]), *map(words.percent, shares)]


def _flushed(site: Site, row: str) -> float | None:
    flushed: float | None = site["formats"].get(row, {}).get("flushed")
    return flushed


def _place(site: Site) -> Place:
    return site["name"], site["kind"], site["part"]


def ahead(exceedances: float | str, horizon: int | None) -> str:
    """Return in words how many of the steps ahead are expected to exceed every recorded one.

    Args:
        exceedances: How many; a string where JSON has no number for it ("NaN").
        horizon: How many steps are ahead; None if that is unknown.
    """
    if isinstance(exceedances, str) or math.isnan(exceedances):
        many = "nobody knows how many"
    else:
        many = f"about {exceedances:,.0f}" if exceedances >= 1.0 else "fewer than 1"
    steps = "the steps" if horizon is None else f"the {horizon:,} steps"
    return f"of {steps} ahead, {many} will have a larger gradient than any of them"
