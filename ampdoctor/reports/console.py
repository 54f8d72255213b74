"""The layout of the human report: folded text, tables, labelled rows and lists.

All text passes through `sanitise` into a `Text`, never through Rich's markup: names come from others' files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, get_character_cell_size, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ampdoctor.reports import text as words
from ampdoctor.reports.escape import sanitise
from ampdoctor.reports.section_words import (
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

_WORD = re.compile(r"\s*\S+\s*")
_JOINTS = ("./\\", "_-:,=")  # long words are broken after one of these characters, first after those of the first group


class Folded:
    """Text that is folded between words, and inside a word that is longer than a line after the dot of a name.

    Rich itself breaks such a word at any character: `feed_forwar` and `d_network`.
    """

    def __init__(self, content: Text, *, hang: int = 0) -> None:
        """Indents every line of `content` but the first by `hang` columns."""
        self._content = content
        self._hang = hang

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a `Text` for each line."""
        width = max(options.max_width, 1)
        hang = self._hang if width > 2 * self._hang else 0
        for index, line in enumerate(self._content.divide(breaks(self._content.plain, width, hang))):
            line.rstrip()
            yield Padding(line, (0, 0, 0, hang)) if index and hang else line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Measure from the longest word, limited by the width, up to all on one line."""
        words_ = self._content.plain.split() or [""]
        whole = min(cell_len(self._content.plain), options.max_width)
        return Measurement(min(max(map(cell_len, words_)), whole), whole)


def breaks(text: str, width: int, hang: int = 0) -> list[int]:
    """Return the offsets in one paragraph where lines begin; all but the first are indented by `hang` columns."""
    found: list[int] = []
    room = width
    column = 0
    for match in _WORD.finditer(text):
        start, word = match.start(), match.group()
        if column and column + cell_len(word.rstrip()) > room:
            found.append(start)
            room, column = width - hang, 0
        while cell_len(word.rstrip()) > room:
            cut = _cut(word, room)
            start, word = start + cut, word[cut:]
            found.append(start)
            room = width - hang
        column += cell_len(word)
    return found


def _cut(word: str, room: int) -> int:
    """Return how many characters of a word fit in a line of `room` columns; at least one."""
    fitting, columns = 0, 0
    for character in word:
        columns += get_character_cell_size(character)
        if columns > room:
            break
        fitting += 1
    for joints in _JOINTS:
        at = max(word.rfind(joint, 0, fitting) for joint in joints) + 1
        if at > fitting // 3:
            return at
    return max(fitting, 1)


def text(said: str, style: str = "") -> Text:
    """Return sanitised text."""
    return Text(sanitise(said), style=style, overflow="fold")


def show(content: Text, console: Console, *, indent: int = 0, hang: int = 0) -> None:
    """Print a paragraph."""
    console.print(Padding(Folded(content, hang=hang), (0, 0, 0, indent)) if indent else Folded(content, hang=hang))


def heading(title: str, console: Console, style: str = "bold") -> None:
    """Print the title of a section, after an empty line."""
    console.print()
    show(text(title, style), console)


def labelled(rows: Iterable[tuple[str, Text]], console: Console, *, indent: int = 2) -> None:
    """Print rows of a label and a text; the labels have a column of their own."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(ratio=1)
    for label, said in rows:
        table.add_row(Text(label), Folded(said))
    if table.row_count:
        console.print(Padding(table, (0, 0, 0, indent)))


def listed(title: str, lines: Iterable[Text | str], console: Console, *, style: str = "bold") -> None:
    """Print a title and a line for each item; nothing without items."""
    items = [line if isinstance(line, Text) else text(line) for line in lines]
    if not items:
        return
    heading(title, console, style)
    for item in items:
        show(item, console, indent=2, hang=2)


def table_of(headings: Sequence[str], rows: Iterable[Sequence[Text | str]], *, left: Iterable[str] = ()) -> Table:
    """Return a table without lines; the first column and those in `left` are left-aligned, the others right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    named = {headings[0], *left}
    for name in headings:
        table.add_column(name, justify="left" if name in named else "right", overflow="fold", vertical="bottom")
    for row in rows:
        table.add_row(*(Folded(cell if isinstance(cell, Text) else text(cell)) for cell in row))
    return table


def titled(title: str, table: Table, console: Console) -> None:
    """Print a table under its title."""
    heading(title, console)
    console.print(Padding(table, (0, 0, 0, 2)))


def left_over(number: int, what: str, console: Console) -> None:
    """Print how many are not shown."""
    if number > 0:
        show(text(f"... and {words.count(number, 'more ' + what)} (-v)", "dim"), console, indent=2)


# -- exponent histograms as bars, with the windows of the formats: values outside a window are lost --

FIRST, LAST = -44, 16  # exponents that are shown; fp16's window lies within at loss scales from 1 to 2^20
BINADES = (1, 2, 3, 4, 5, 6)  # exponents that may share a column, finest first; each divides the shown range
WINDOWS: Mapping[str, tuple[float, float]] = {"fp16": (-25, 16), "bf16": (-134, 128), "e5m2": (-17, 16)}
"""log2 of the magnitude below which a format rounds to zero, and of the end of its range (65504 is nearly 2^16)."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of bars and rulers: levels, the ends of a window, ends beyond the axis, and its line."""

    levels: str
    left: str
    right: str
    further_left: str
    further_right: str
    line: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "├", "┤", "◄", "►", "─")
ASCII = Glyphs(".:-=+*#@", "|", "|", "<", ">", "-")  # for a stream whose encoding has no block elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of exponents from `FIRST` to `LAST`, with `binades` (one of `BINADES`) of them a column."""

    binades: int
    glyphs: Glyphs = UNICODE

    @property
    def columns(self) -> int:
        """The width."""
        return (LAST - FIRST) // self.binades

    def scale(self) -> str:
        """Return a line with the exponents at both ends."""
        low, high = f"2^{FIRST}", f"2^{LAST}"
        return f"{low}{high:>{self.columns - len(low)}}"

    def window(self, name: str, *, shift: float = 0.0) -> str:
        """Return the window of a format in `WINDOWS`, `shift` powers of two further down, as a line: `├──fp16──┤`."""
        low, high = (self._column(edge - shift) for edge in WINDOWS[name])
        start, end = max(low, 0), min(high, self.columns)
        if end - start < 2:
            return ""
        left = self.glyphs.left if low >= 0 else self.glyphs.further_left
        right = self.glyphs.right if high <= self.columns else self.glyphs.further_right
        label = name if end - start - 2 >= len(name) else ""
        return " " * start + left + label.center(end - start - 2, self.glyphs.line) + right

    def bars(self, histogram: Mapping[str, Any], *, shift: float = 0.0) -> str:
        """Return counts by exponent as bars, each as high as the logarithm of its share; outliers count at the ends.

        `histogram` has `bins` and `counts` as `numerics.Histogram.to_dict` gives them: eight bins for each power of
        two. The counted magnitudes are `shift` powers of two above the shown ones.
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
    """Return the finest axis of at most `width` columns; None where even the coarsest is wider."""
    axes = (Axis(binades=binades, glyphs=glyphs) for binades in BINADES)
    return next((axis for axis in axes if axis.columns <= width), None)


# -- layers that lose most in fp16, with their exponents under the formats' windows --

_WIDTHS = (2, 7, 8, 7, 7)
_INDENT = 2
_GAP = 2


def layers(profile: Mapping[str, Any], console: Console, *, verbose: int) -> None:
    """Print gradients, and with `verbose` activations and weights, which no loss scale changes."""
    sites, measured = half_sites(profile), measured_of(profile)
    gradients = [site for site in sites if site["kind"] in GRADIENTS]
    if gradients:
        heading("layers, those that lose most first", console)
        _table(gradients, measured, _scales(profile), console, verbose)
    others = [site for site in sites if site["kind"] not in GRADIENTS] if verbose else []
    if others:
        heading("the same of activations (A) and weights (W), which no loss scale moves", console)
        _table(others, measured, [("fp16", 1.0)], console, verbose)


def _scales(profile: Mapping[str, Any]) -> list[tuple[str, float]]:
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
    """Print names before their figures if both fit on a line, else on a line above them."""
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
    show(text((" " * (stem - figures_width) + _line(LAYER_HEADINGS)).rstrip(), "bold"), console)
    for name, site in zip(names, shown, strict=True):
        bars = "" if axis is None else axis.bars(site["histogram"], shift=_shift(site))
        figures = (_line(layer_cells(site, measured)) + bars).rstrip()
        if beside:
            console.print(text(" " * _INDENT + set_cell_size(name, before) + figures))
        else:
            show(text(name), console, indent=_INDENT, hang=2)
            console.print(text(" " * (_INDENT + before) + figures))
    left_over(len(sites) - len(shown), "layer", console)
    if axis is None:
        show(text("(a wider terminal shows the exponents, too)", "dim"), console, indent=_INDENT)


def _rulers(
    axis: Axis, sites: Sequence[Site], scales: Sequence[tuple[str, float]], stem: int, console: Console
) -> None:
    largest = max((site["amax"] for site in sites if isinstance(site["amax"], float)), default=1.0)
    top = math.ceil(math.log2(largest)) if 0.0 < largest < math.inf else 0
    rulers = [(f"magnitudes, {words.count(axis.binades, 'power')} of two a column", axis.scale())]
    rulers += [(said, axis.window("fp16", shift=math.log2(scale))) for said, scale in scales if 0.0 < scale < math.inf]
    rulers += [
        ("bf16", axis.window("bf16")),
        ("e5m2, scaled to the largest", axis.window("e5m2", shift=WINDOWS["e5m2"][1] - top)),
    ]
    for said, ruler in rulers:
        console.print(text(f"{' ' * _INDENT}{said:<{stem - _INDENT - 1}} {ruler}".rstrip(), "dim"))


def _line(cells: Sequence[str]) -> str:
    first, *figures = (f"{cell:<{_WIDTHS[0]}}" if not i else f"{cell:>{_WIDTHS[i]}}" for i, cell in enumerate(cells))
    return (" " * _GAP).join((first, *figures)) + " " * _GAP


def _shift(site: Site) -> int:
    """Return the powers of two from the unscaled loss's magnitudes up to the counted ones, if the step scales it."""
    counted, shown = site["histogram"].get("amax"), site["amax"]
    if not isinstance(counted, str) or not isinstance(shown, float) or not 0.0 < shown < math.inf:
        return 0
    ratio = float.fromhex(counted) / shown
    return round(math.log2(ratio)) if 0.0 < ratio < math.inf else 0
