"""Makes text from outside (tensor and module names, paths, messages) safe to show.

The author of a checkpoint chose its names: escape sequences in a name could rewrite a terminal, bidirectional controls
could reorder a line, and a newline could forge one. In the log of a GitHub workflow, a line that begins with
`::set-output ...::` (a folded name may begin a line) is a command to the runner.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that act on a terminal, are invisible or cannot be encoded: controls, format characters (with the
bidirectional ones), surrogates, line and paragraph separators."""

_UNSEEN = (
    (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2800, 0x2800), (0x3164, 0x3164),
    (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0xE0000, 0xE0FFF),
)  # fmt: skip
"""First and last of invisible characters of other categories: those with Unicode's property
Default_Ignorable_Code_Point (Hangul fillers, joiners, variation selectors), and the empty Braille pattern."""

_COMMAND = re.compile(
    r"::(?=(?:add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|internal-set-repo-path|notice|remove-matcher"
    r"|save-state|set-env|set-output|stop-commands|warning)(?:\s|::))|##(?=\[)",
    re.IGNORECASE,
)
"""The beginning of a command to GitHub's runner: `::name` of a known command at the start of a line, and the older
`##[` anywhere in a line (actions/runner, ActionCommand.cs and ActionCommandManager.cs)."""

_LONGEST = 1000  # characters of an error's sentence: more than ours with ordinary names, and still quick to read
_TAIL = 300
_LONG_NAME = re.compile(r"\S{501,}")
_NAME_HEAD, _NAME_TAIL = 300, 150


def sanitise(text: str) -> str:
    r"""Return `text` with every character escaped that acts on a terminal or is invisible (`\x1b`, `\u202e`)."""
    # At the beginning of a command to GitHub's runner, the second character is escaped (`:\x3aerror`, `#\x23[group]`).
    shown = "".join(_escaped(c) if _is_hidden(c) else c for c in text)
    return _COMMAND.sub(lambda found: found[0][0] + _escaped(found[0][1]), shown)


def sentence(text: str) -> str:
    """Returns one sanitised line of bounded length; its beginning and its end are kept."""
    line = sanitise(text.strip())
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST - _TAIL - 5]} ... {line[-_TAIL:]}"


def shortened(text: str) -> str:
    """Returns a text for people, in which names of more than 500 characters have three dots in their middle."""
    return _LONG_NAME.sub(lambda found: f"{found[0][:_NAME_HEAD]}...{found[0][-_NAME_TAIL:]}", text)


def sanitise_lines(text: str) -> str:
    """Returns sanitised text of several lines, such as a traceback; newlines stay, tabs become spaces."""
    return "\n".join(sanitise(line.expandtabs(4)) for line in text.split("\n"))


def _is_hidden(character: str) -> bool:
    if character.isascii():
        return not character.isprintable()
    code = ord(character)
    return unicodedata.category(character) in _HIDDEN or any(first <= code <= last for first, last in _UNSEEN)


def _escaped(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


# -- GitHub-flavoured Markdown in which names from outside stay plain names --
#
# A word of prose is unchanged. Every other word (a name, a path, a number with a unit) becomes a code span: in it,
# GitHub resolves no mention (`@team`), issue (`#123`), link, emoji or commit, and there is no markup. Words with a
# backtick, a pipe or a backslash become `<code>` with every mark as a character reference, because a pipe ends a
# table's cell even in a code span.

_PROSE = re.compile(
    r"(?![a-fA-F]{7})\(?(?:[A-Za-z]+(?:['-][A-Za-z]+)*|[-+]?[0-9]{1,6}(?:\.[0-9]+)?%?)\)?[.,;:?!]?|[-=<%]"
)
"""Words without a meaning in Markdown inside a line; seven hexadecimal digits may be a commit."""
_LONGEST_WORD = 30  # a longer word is a name
_MOST_IN_BRACKETS = 32  # words
_NAMED = re.compile(r"(.+?)([.,;:!?]*)")  # a name before punctuation marks
_CODE_SPAN = re.compile(r"[^`|\\]+")
_MARK = re.compile(r"[^A-Za-z0-9 \x80-\U0010ffff]")
_BACKTICKS = re.compile(r"`+")


def prose(text: str, *, html: bool = False) -> str:
    """Returns a line of text from outside for inline Markdown; inside an `html` block code spans do not work."""
    return " ".join(_word(word, html=html) for word in _words(sanitise(shortened(text)).split(" ")))


def code(name: str, *, html: bool = False) -> str:
    """Returns a name with its spaces as a code span; "" for an empty name."""
    shown = sanitise(shortened(name))
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


def _words(words: Sequence[str]) -> Iterator[str]:
    """Yields the words; a value in brackets, such as `[16, 8]` or `betas=(0.9, 0.95)`, is one."""
    at = 0
    while at < len(words):
        ends = range(at + 1, min(at + _MOST_IN_BRACKETS, len(words)) + 1)
        end = next((end for end in ends if _is_closed(" ".join(words[at:end]))), at + 1)
        yield " ".join(words[at:end])
        at = end


def _is_closed(text: str) -> bool:
    text = text.lstrip("(")  # a sentence in brackets
    return sum(map(text.count, "([{")) <= sum(map(text.count, ")]}"))


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
