r"""Text for GitHub-flavoured Markdown in which names from outside are only names.

A word of prose stays as it is. Every other word (a name, a path, a number with a unit) becomes a code span: GitHub
resolves no mention (`@team`), issue (`#123`), link, emoji or commit in it, and nothing in it is markup. Words with a
backtick, a pipe or a backslash become `<code>` with every mark as a character reference, because a table's cell ends at
a pipe even in a code span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ampdoctor.reports.words.sanitise import sanitise

_PROSE = re.compile(
    r"(?![a-fA-F]{7})\(?(?:[A-Za-z]+(?:['-][A-Za-z]+)*|[-+]?[0-9]{1,6}(?:\.[0-9]+)?%?)\)?[.,;:?!]?|[-=<%]"
)
"""Words that mean nothing to Markdown after the beginning of a line; seven hexadecimal digits may name a commit."""
_LONGEST_WORD = 30  # a longer word is a name
_NAMED = re.compile(r"(.+?)([.,;:!?]*)")
"""A name before the marks of its sentence."""
_CODE_SPAN = re.compile(r"[^`|\\]+")
_MARK = re.compile(r"[^A-Za-z0-9 \x80-\U0010ffff]")
_BACKTICKS = re.compile(r"`+")


def prose(text: str, *, html: bool = False) -> str:
    """Returns one line of text from outside, for a place of inline Markdown.

    Args:
        text: Any text; invisible characters are shown as escapes.
        html: True inside an HTML block, where Markdown's own code spans are not read.
    """
    return " ".join(_word(word, html=html) for word in sanitise(text).split(" "))


def code(name: str, *, html: bool = False) -> str:
    """Returns a name, spaces included, as a code span; nothing for an empty name."""
    shown = sanitise(name)
    if not shown:
        return ""
    if not html and _CODE_SPAN.fullmatch(shown) and shown == shown.strip(" "):
        return f"`{shown}`"
    return f"<code>{_MARK.sub(lambda found: f'&#{ord(found[0])};', shown)}</code>"


def fence(lines: Sequence[str], language: str = "") -> str:
    """Returns lines to copy, in a fence that none of them can close."""
    longest = max((len(run) for line in lines for run in _BACKTICKS.findall(line)), default=0)
    marks = "`" * max(3, longest + 1)
    return "\n".join([f"{marks}{language}", *map(sanitise, lines), marks])


def row(cells: Iterable[str]) -> str:
    """Returns a row of a table; the functions above make its cells."""
    return f"| {' | '.join(cells)} |\n"


def header(*titles: str) -> str:
    """Returns the head of a table."""
    return row(titles) + row("---" for _ in titles)


def _word(word: str, *, html: bool) -> str:
    if not word or (len(word) <= _LONGEST_WORD and _PROSE.fullmatch(word)):
        return word.replace("<", "&lt;") if html or word == "<" else word
    named = _NAMED.fullmatch(word)
    before, (name, after) = "", named.groups() if named is not None else (word, "")
    left_open = name.count("(") - name.count(")")  # `f(x)` and `(x)` are complete words
    if left_open > 0 and name.startswith("(") and len(name) > 1:
        before, name = "(", name[1:]
    elif left_open < 0 and name.endswith(")") and len(name) > 1:
        name, after = name[:-1], f"){after}"
    return f"{before}{code(name, html=html)}{after}"
