"""The six kinds of block that a report for people is made of; console, Markdown and HTML each draw them.

A style is a word (a severity, a verdict, a status, `strong`, `muted`), never a colour: each writer has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, a cell or a title."""

    text: str
    style: str = ""  # of the label if there is one, else of the text
    label: str = ""  # a word or two before it that are to be seen first


Line: TypeAlias = str | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """The title of what follows; in HTML it can be linked to, and a chart, its view, is drawn below it."""

    text: str
    level: int = 3  # 1 for the report's, 2 for a section's, 3 within a section
    anchor: str = ""
    view: str = ""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Lines, each behind a label or behind none."""

    rows: tuple[tuple[str, Line], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below headings."""

    head: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    left: frozenset[str] = frozenset()  # columns of words, beside the first; all others are numbers
    scripted: bool = False  # in HTML the section's view shows these rows, sorted and searched


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Lines to copy, never folded."""

    lines: tuple[str, ...]
    title: str = ""
    language: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Blocks below a title that opens and closes them; a console shows what is closed only with `-v`."""

    title: Text
    blocks: tuple[Block, ...] = ()  # none where only HTML has something to show, a view
    open: bool = False
    style: str = ""  # a severity, of a finding
    anchor: str = ""
    view: str = ""


Block: TypeAlias = Heading | Text | Pairs | Table | Code | Fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A report in blocks."""

    head: tuple[Block, ...]  # what was examined, and the verdict
    findings: tuple[Block, ...]
    sections: tuple[Block, ...]  # all else, by headings of level 2
    next: Text | Code  # what to do; each writer puts it where its readers look first


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
