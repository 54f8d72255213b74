"""The console writer: the verdict, the findings, the details, and last what to do, in a terminal's width.

All text passes through `sanitise` into a Rich `Text`, never through Rich's markup: names come from others' files.
Severity and outcome are words first, and colours second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len, get_character_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text as Shown

from ampdoctor.evidence.report import SEVERITIES, Report
from ampdoctor.reports.blocks import Block, Code, Fold, Heading, Line, Pairs, Table, Text, without_empty
from ampdoctor.reports.escape import sanitise, shortened
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.outline import outline

WIDTH = 100  # columns that fit most terminals and logs
_MARGIN = 7  # columns before what is said of a finding
_MOST_LINES = 8  # of a finding where the lines to paste are few; those are always whole
_TWO_LINES = 155  # least characters, with what proves a change behind them
_CLAUSE = re.compile(r"(?<=[^.]\.) |; |: ")
_LONGEST_LABEL = 28  # columns of a label beside its text; one that is longer stands in the text's line
_STYLES = {
    "strong": "bold",
    "muted": "dim",
    **dict.fromkeys(("error", "sick"), "bold red"),
    **dict.fromkeys(("failed", "worse"), "red"),
    **dict.fromkeys(("warning", "not_reproduced", "inconclusive", "unreadable"), "bold yellow"),
    **dict.fromkeys(("intervention", "not_run"), "yellow"),
    "note": "bold cyan",
    "healthy": "bold green",
    **dict.fromkeys(("ok", "verified"), "green"),
}


def render(report: Report, options: RenderOptions) -> str:
    """Return the report as text for a console."""
    return options.draw(lambda console: render_human(report, console, quiet=options.quiet, verbose=options.verbose))


def plain_text(report: Report, *, quiet: bool = False, verbose: int = 0, width: int = WIDTH) -> str:
    """Return the report without colour, for a test's failure or a log."""
    text = render(report, RenderOptions(width=width, color="never", quiet=quiet, verbose=verbose))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")


def render_human(report: Report, console: Console, *, quiet: bool = False, verbose: int = 0) -> None:
    """Print the report to `console`, whose width folds long names.

    `quiet` shows only findings and what could not be examined. From `verbose` 1 on, folds are open.
    """
    said = outline(report)
    writer = _Writer(console, unfold=bool(verbose))
    if quiet:
        writer.draw(without_empty(said.findings), 0)
        for error in report.errors:
            writer.text(Text(f"not examined: {error.what} ({error.kind}): {error.message}"), 0)
        return
    writer.draw([*said.head, *said.findings], 0)
    writer.draw(without_empty(said.sections), 2)
    console.print()
    writer.draw([said.next], 0)


class _Writer:
    """Prints blocks; those of a section are indented below its heading."""

    def __init__(self, console: Console, *, unfold: bool) -> None:
        self._console = console
        self._unfold = unfold
        self._begun = False

    def draw(self, blocks: Sequence[Block], indent: int) -> None:
        """Print blocks; the titles of folds that stay closed stand in one line."""
        closed: list[str] = []
        for block in blocks:
            if isinstance(block, Fold) and not (block.open or self._unfold):
                closed.append(_clean(block.title.text))
                continue
            self._closed(closed, indent)
            self._block(block, indent)
        self._closed(closed, indent)

    def _finding(self, block: Fold) -> None:
        """Print a finding; without -v in eight lines, of which the last says what else there is."""
        inner = without_empty(block.blocks)
        self._space()
        self.text(block.title, 0)
        if self._unfold:
            for one in inner:
                self._block(one, _MARGIN + 2 if isinstance(one, Fold) else 0, _MARGIN)
            return
        width = self._console.width
        shown: list[Block] = []
        for room in (max(_TWO_LINES, 2 * (width - _MARGIN) - 30), width - 2 * _MARGIN):
            shown = [_brief(one, room) for one in inner if not isinstance(one, Fold)]
            if self._height(block.title, shown) <= _MOST_LINES:
                break
        closed = list(dict.fromkeys(one.title.text for one in inner if isinstance(one, Fold)))
        if closed and isinstance(last := shown[-1], Pairs):
            label, line = last.rows[-1]
            said = f"{line if isinstance(line, str) else line.text}    -v: {', '.join(closed)}"
            shown[-1] = Pairs((*last.rows[:-1], (label, Text(said, "muted"))))
        for one in shown:
            self._block(one, 0, _MARGIN)

    def _height(self, title: Line, blocks: Sequence[Block]) -> int:
        """Return the lines of a finding; its last row takes one."""
        width = self._console.width
        texts = [row for one in blocks for row in ([("", one)] if isinstance(one, Text) else getattr(one, "rows", ()))]
        taken = 1 + len(breaks(_shown(title).plain, width, 2)) + 1
        taken += sum(1 + len(breaks(_shown(line).plain, max(width - _MARGIN, 1))) for _, line in texts[:-1])
        return taken + sum(len(one.lines) for one in blocks if isinstance(one, Code))

    def _closed(self, titles: list[str], indent: int) -> None:
        if titles:
            self.text(Text(f"-v: {'; '.join(dict.fromkeys(titles))}", "muted"), indent)
            titles.clear()

    def _block(self, block: Block, indent: int, margin: int = 0) -> None:
        match block:
            case Heading():
                self._space()
                self.text(Text(block.text, "strong"), 0)
            case Text():
                self.text(block, margin or indent, hang=0 if margin else 2)
            case Pairs():
                self._pairs(block, indent, margin)
            case Table():
                self._console.print(Padding(_grid(block), (0, 0, 0, indent)))
            case Code():
                if block.title:
                    self.text(Text(f"{block.title}:"), indent)
                for line in block.lines:  # never folded, so that a copy is whole
                    self._console.print(Shown(f"{' ' * (margin or indent + 2)}{sanitise(line)}"), soft_wrap=True)
            case Fold(style=""):
                self._space()
                self.text(Text(block.title.text, "strong"), max(indent - 2, 0))
                self.draw(without_empty(block.blocks), indent)
            case Fold():
                self._finding(block)

    def _space(self) -> None:
        if self._begun:
            self._console.print()
        self._begun = True

    def text(self, line: Line, indent: int, *, hang: int = 2) -> None:
        """Print a paragraph."""
        self._begun = True
        shown = Folded(_shown(line), hang=hang)
        self._console.print(Padding(shown, (0, 0, 0, indent)) if indent else shown)

    def _pairs(self, block: Pairs, indent: int, margin: int) -> None:
        """Print labels in a column of their own; where one is long, each line begins with its label."""
        if max(cell_len(_clean(label)) for label, _ in block.rows) > _LONGEST_LABEL:
            for label, line in block.rows:
                beside = Shown(f"{_clean(label)}: " if label else "")
                self._console.print(Padding(Folded(beside + _shown(line), hang=2), (0, 0, 0, indent)))
            return
        grid = Grid.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim", min_width=max(margin - 2, 0))
        grid.add_column(ratio=1)
        for label, line in block.rows:
            grid.add_row(Shown(_clean(label)), Folded(_shown(line)))
        self._console.print(Padding(grid, (0, 0, 0, indent)))


def _brief(block: Block, room: int) -> Block:
    """Return the block with texts of at most two lines, up to the end of a clause; what proves a change stays."""
    if isinstance(block, Text):
        return Text(_cut_off(block.text, room), block.style)
    if not isinstance(block, Pairs):
        return block
    rows = []
    for label, line in block.rows:
        said = line if isinstance(line, str) else line.text
        body, mark, proof = said.rpartition(" (") if said.endswith(")") else (said, "", "")
        rows.append((label, Text(_cut_off(body, room) + mark + proof, "" if isinstance(line, str) else line.style)))
    return Pairs(tuple(rows))


def _cut_off(said: str, room: int) -> str:
    ends = [found.start() for found in _CLAUSE.finditer(said) if found.start() <= room]
    return said[: ends[-1]].rstrip(" ;:") if len(said) > room and ends else said


def _clean(text: str) -> str:
    return sanitise(shortened(text))


def _shown(line: Line) -> Shown:
    if isinstance(line, str):
        return Shown(_clean(line), overflow="fold")
    style = _STYLES.get(line.style, "")
    if not line.label:
        return Shown(_clean(line.text), style=style, overflow="fold")
    label = line.label.upper() if line.label in SEVERITIES else line.label
    gap = "" if not line.text else "  " if line.label in SEVERITIES else " "
    return Shown(overflow="fold").append(_clean(label), style).append(_clean(f"{gap}{line.text}"))


def _grid(block: Table) -> Grid:
    grid = Grid(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for index, name in enumerate(block.head):
        side = "left" if index == 0 or name in block.left else "right"
        grid.add_column(_clean(name), justify=side, overflow="fold", vertical="bottom")  # type: ignore[arg-type]
    for row in block.rows:
        grid.add_row(*(Folded(_shown(cell)) for cell in row))
    return grid


# -- lines are folded between words, and inside a long word after the dot of a name --

_WORD = re.compile(r"\s*\S+\s*")
_JOINTS = ("./\\", "_-:,=")  # long words are broken after one of these characters, first after those of the first group


class Folded:
    """Shown that is folded between words, and inside a word that is longer than a line after the dot of a name.

    Rich itself breaks such a word at any character: `feed_forwar` and `d_network`.
    """

    def __init__(self, content: Shown, *, hang: int = 0) -> None:
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
