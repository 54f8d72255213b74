"""The six kinds of block that a report for people is made of; console, Markdown and HTML each draw them.

A style is a word (a severity, a verdict, a status, `strong`, `muted`), never a colour: each writer has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, a cell or a title.

    Attributes:
        text: What is said.
        style: A word; of the label if there is one, else of the text.
        label: A word or two before it that are to be seen first.
    """

    text: str
    style: str = ""
    label: str = ""


Line: TypeAlias = str | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The title of what follows.

    Attributes:
        text: The title.
        level: 1 for the report's, 2 for a section's, 3 within a section.
        anchor: Name of the section, to link to.
        view: Chart that the HTML page draws below it.
    """

    text: str
    level: int = 3
    anchor: str = ""
    view: str = ""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Lines, each behind a label or behind none."""

    rows: tuple[tuple[str, Line], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below headings.

    Attributes:
        head: The headings.
        rows: A cell for each heading.
        left: Columns of words, beside the first; all others are numbers.
        scripted: In HTML the section's view shows these rows, sorted and searched.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    left: frozenset[str] = field(default_factory=frozenset)
    scripted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Lines to copy.

    Attributes:
        lines: The lines, never folded.
        title: What they are for.
        language: For colours.
    """

    lines: tuple[str, ...]
    title: str = ""
    language: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Blocks below a title that opens and closes them.

    Attributes:
        title: What lies inside.
        blocks: The blocks; none where only HTML has something to show, a view.
        open: Open from the start; a console shows what is closed only with `-v`.
        style: A severity, of a finding.
        anchor: Name, to link to.
        view: As a heading's.
    """

    title: Text
    blocks: tuple[Block, ...] = ()
    open: bool = False
    style: str = ""
    anchor: str = ""
    view: str = ""


Block: TypeAlias = Heading | Text | Pairs | Table | Code | Fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A report in blocks.

    Attributes:
        head: What was examined, and the verdict.
        findings: Of each finding, or group of findings, a fold.
        sections: All else, by headings of level 2.
        next: What to do; each writer puts it where its readers look first.
    """

    head: tuple[Block, ...]
    findings: tuple[Block, ...]
    sections: tuple[Block, ...]
    next: Text | Code


def without_empty(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks without folds that hold nothing, and without headings that have nothing below them."""
    kept: list[Block] = []
    for block in reversed(blocks):
        if isinstance(block, Fold) and not block.blocks:
            continue
        after = kept[-1] if kept else None
        ends = after is None or (
            isinstance(after, Heading) and isinstance(block, Heading) and after.level <= block.level
        )
        if not (isinstance(block, Heading) and ends):
            kept.append(block)
    return kept[::-1]


def pairs(rows: Iterable[tuple[str, Line]]) -> tuple[Pairs, ...]:
    """Return the rows as a block; () without rows."""
    made = tuple(rows)
    return (Pairs(made),) if made else ()


def table(head: Sequence[str], rows: Iterable[Sequence[Line]], left: Iterable[str] = ()) -> tuple[Table, ...]:
    """Return the rows as a table; () without rows."""
    made = tuple(map(tuple, rows))
    return (Table(head=tuple(head), rows=made, left=frozenset(left)),) if made else ()


def fold(title: str, *blocks: Block) -> tuple[Fold, ...]:
    """Return a closed fold; () without blocks."""
    return (Fold(title=Text(title), blocks=blocks),) if blocks else ()
