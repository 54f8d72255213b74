"""The layout of the human report: folded text, tables, labelled rows and lists.

All text passes through `sanitise` into a `Text`, never through Rich's markup: names come from others' files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, get_character_cell_size
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
        self._content = content
        self._hang = hang

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
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


# -- layers that lose most in fp16 --


def layers(profile: Mapping[str, Any], console: Console, *, verbose: int) -> None:
    """Print gradients, and with `verbose` activations and weights, which no loss scale changes."""
    sites = half_sites(profile)
    gradients = [site for site in sites if site["kind"] in GRADIENTS]
    _layers("layers, those that lose most first", gradients, profile, console, verbose)
    if verbose:
        others = [site for site in sites if site["kind"] not in GRADIENTS]
        title = "the same of activations (A) and weights (W), which no loss scale moves"
        _layers(title, others, profile, console, verbose)


def _layers(title: str, sites: Sequence[Site], profile: Mapping[str, Any], console: Console, verbose: int) -> None:
    if not sites:
        return
    measured = measured_of(profile)
    shown = worst_first(sites, measured)[: None if verbose else FEW]
    rows = [(layer_name(site), *layer_cells(site, measured)) for site in shown]
    titled(title, table_of(("layer", *LAYER_HEADINGS), rows, left=LAYER_HEADINGS[:1]), console)
    left_over(len(sites) - len(shown), "layer", console)
