"""Exponent histograms as bars, and beside them the windows of the formats: what lies outside of one is lost in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST, LAST = -44, 16
"""Exponents that are shown: fp16's window at loss scales from 1 to 2^20 lies within."""
BINADES = (1, 2, 3, 4, 5, 6)
"""How many exponents may share a column, finest first; each divides what is shown."""
WINDOWS: Mapping[str, tuple[float, float]] = {"fp16": (-25, 16), "bf16": (-134, 128), "e5m2": (-17, 16)}
"""log2 of the magnitude below which a format rounds to zero, and of the end of its range (65504 is nearly 2^16)."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of bars and rulers: rising levels, the ends of a window, those where it goes on, its line."""

    levels: str
    left: str
    right: str
    further_left: str
    further_right: str
    line: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "├", "┤", "◄", "►", "─")
ASCII = Glyphs(".:-=+*#@", "|", "|", "<", ">", "-")
"""For a stream whose encoding has no block elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Exponents from `FIRST` to `LAST`, `binades` of them a column.

    Attributes:
        binades: One of `BINADES`.
        glyphs: What it is drawn with.
    """

    binades: int
    glyphs: Glyphs = UNICODE

    @property
    def columns(self) -> int:
        """How wide it is."""
        return (LAST - FIRST) // self.binades

    def scale(self) -> str:
        """The exponents at both ends."""
        low, high = f"2^{FIRST}", f"2^{LAST}"
        return f"{low}{high:>{self.columns - len(low)}}"

    def window(self, name: str, *, shift: float = 0.0) -> str:
        """A format's window as a line with its name in it: `├──fp16──┤`.

        Args:
            name: A format of `WINDOWS`.
            shift: Binades by which a scale moves the values up, and so the window down.
        """
        low, high = (self._column(edge - shift) for edge in WINDOWS[name])
        start, end = max(low, 0), min(high, self.columns)
        if end - start < 2:
            return ""
        left = self.glyphs.left if low >= 0 else self.glyphs.further_left
        right = self.glyphs.right if high <= self.columns else self.glyphs.further_right
        label = name if end - start - 2 >= len(name) else ""
        return " " * start + left + label.center(end - start - 2, self.glyphs.line) + right

    def bars(self, histogram: Mapping[str, Any], *, shift: float = 0.0) -> str:
        """Counts by exponent, each as high as the logarithm of its share; what lies beyond an end stands at that end.

        Args:
            histogram: `bins` and `counts` as `numerics.Histogram.to_dict` gives them: eight bins a binade.
            shift: Binades that the counted magnitudes lie above those that are shown.
        """
        totals = [0] * self.columns
        for index, count in zip(histogram.get("bins") or (), histogram.get("counts") or (), strict=False):
            column = math.floor((index // 8 - 127 - shift - FIRST) / self.binades)
            totals[min(max(column, 0), self.columns - 1)] += count
        top = math.log1p(max(totals))
        levels = self.glyphs.levels
        return "".join(
            levels[math.ceil(len(levels) * math.log1p(count) / top) - 1] if count else " " for count in totals
        )

    def _column(self, exponent: float) -> int:
        return round((exponent - FIRST) / self.binades)


def fitting(width: int, glyphs: Glyphs) -> Axis | None:
    """The finest axis of at most `width` columns; None where even the coarsest is wider."""
    axes = (Axis(binades=binades, glyphs=glyphs) for binades in BINADES)
    return next((axis for axis in axes if axis.columns <= width), None)
