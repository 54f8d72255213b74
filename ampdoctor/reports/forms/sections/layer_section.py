"""The layers that lose most in fp16, each with its exponents under the formats' windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from ampdoctor.reports.forms.sections import layout
from ampdoctor.reports.forms.sections.exponents import ASCII, UNICODE, WINDOWS, Axis, fitting
from ampdoctor.reports.forms.sections.layout import text
from ampdoctor.reports.words import words
from ampdoctor.reports.words.range_words import (
    FEW,
    GRADIENTS,
    LAYER_HEADINGS,
    Place,
    Site,
    half_sites,
    layer_cells,
    layer_name,
    measured_of,
    worst_first,
)
from ampdoctor.reports.words.sanitise import sanitise

_WIDTHS = (2, 7, 8, 7, 7)
_INDENT = 2
_GAP = 2


def layers(profile: Mapping[str, Any], console: Console, *, verbose: int) -> None:
    """Print gradients, and with `verbose` activations and weights, which no loss scale moves."""
    sites, measured = half_sites(profile), measured_of(profile)
    gradients = [site for site in sites if site["kind"] in GRADIENTS]
    if gradients:
        layout.heading("layers, those that lose most first", console)
        _table(gradients, measured, _scales(profile), console, verbose)
    others = [site for site in sites if site["kind"] not in GRADIENTS] if verbose else []
    if others:
        layout.heading("the same of activations (A) and weights (W), which no loss scale moves", console)
        _table(others, measured, [("fp16", 1.0)], console, verbose)


def _scales(profile: Mapping[str, Any]) -> list[tuple[str, float]]:
    """fp16's windows: at the run's own loss scale, and at the one that fits, where it is another one."""
    own, fits = profile.get("loss_scale") or 1.0, profile.get("recommended_scale")
    found = [(f"fp16 at a loss scale of {words.binary(own)}", float(own))]
    if fits and fits != own:
        found.append((f"fp16 at {words.binary(fits)}, which fits", float(fits)))
    return found


def _table(
    sites: Sequence[Site],
    measured: Mapping[Place, float],
    scales: Sequence[tuple[str, float]],
    console: Console,
    verbose: int,
) -> None:
    """Names stand before their figures where both fit on a line, else on a line of their own above them."""
    shown = worst_first(sites, measured)[: None if verbose else FEW]
    names = [sanitise(layer_name(site)) for site in shown]
    longest = max(map(cell_len, names))
    figures_width = sum(_WIDTHS) + _GAP * len(_WIDTHS)
    room = console.width - _INDENT - figures_width
    beside = longest + _GAP + Axis(binades=3).columns <= room
    before = longest + _GAP if beside else _INDENT
    axis = fitting(room - before, ASCII if console.options.ascii_only else UNICODE)
    stem = _INDENT + before + figures_width
    if axis is not None:
        _rulers(axis, shown, scales, stem, console)
    layout.show(text((" " * (stem - figures_width) + _line(LAYER_HEADINGS)).rstrip(), "bold"), console)
    for name, site in zip(names, shown, strict=True):
        bars = "" if axis is None else axis.bars(site["histogram"], shift=_shift(site))
        figures = (_line(layer_cells(site, measured)) + bars).rstrip()
        if beside:
            console.print(text(" " * _INDENT + set_cell_size(name, before) + figures))
        else:
            layout.show(text(name), console, indent=_INDENT, hang=2)
            console.print(text(" " * (_INDENT + before) + figures))
    layout.left_over(len(sites) - len(shown), "layer", console)
    if axis is None:
        layout.show(text("(a wider terminal shows the exponents, too)", "dim"), console, indent=_INDENT)


def _rulers(
    axis: Axis, sites: Sequence[Site], scales: Sequence[tuple[str, float]], stem: int, console: Console
) -> None:
    """The axis and each format's window, above the column of bars."""
    largest = max((site["amax"] for site in sites if isinstance(site["amax"], float)), default=1.0)
    top = math.ceil(math.log2(largest)) if 0.0 < largest < math.inf else 0
    rulers = [(f"magnitudes, {words.count(axis.binades, 'binade')} a column", axis.scale())]
    rulers += [(said, axis.window("fp16", shift=math.log2(scale))) for said, scale in scales if 0.0 < scale < math.inf]
    rulers += [
        ("bf16", axis.window("bf16")),
        ("e5m2, scaled to the largest", axis.window("e5m2", shift=WINDOWS["e5m2"][1] - top)),
    ]
    for said, ruler in rulers:
        console.print(text(f"{' ' * _INDENT}{said:<{stem - _INDENT - 1}} {ruler}".rstrip(), "dim"))


def _line(cells: Sequence[str]) -> str:
    """Cells side by side: the first to the left, figures to the right."""
    first, *figures = (f"{cell:<{_WIDTHS[0]}}" if not i else f"{cell:>{_WIDTHS[i]}}" for i, cell in enumerate(cells))
    return (" " * _GAP).join((first, *figures)) + " " * _GAP


def _shift(site: Site) -> int:
    """Binades that the counted magnitudes lie above those of the unscaled loss, where the user's step scales it."""
    counted, shown = site["histogram"].get("amax"), site["amax"]
    if not isinstance(counted, str) or not isinstance(shown, float) or not 0.0 < shown < math.inf:
        return 0
    ratio = float.fromhex(counted) / shown
    return round(math.log2(ratio)) if 0.0 < ratio < math.inf else 0
