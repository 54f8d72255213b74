"""Make text that came from outside (tensor and module names, paths, messages) harmless to show.

A name in a checkpoint is chosen by whoever wrote the file: escape sequences in it could rewrite a terminal,
bidirectional controls could reorder a line, a newline could forge one, and in the log of a GitHub workflow a line that
begins with `::set-output ...::` (a folded name may begin a line) is a command to the runner.
"""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that act on a terminal or cannot be seen or encoded: controls, format characters (among them the
bidirectional ones), surrogates, line and paragraph separators."""

_UNSEEN = (
    (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2800, 0x2800), (0x3164, 0x3164),
    (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0xE0000, 0xE0FFF),
)  # fmt: skip
"""First and last of the characters of other categories that are not seen either: those of Unicode's property
Default_Ignorable_Code_Point (fillers of Hangul, joiners, variation selectors), and the empty Braille pattern."""

_COMMAND = re.compile(
    r"::(?=(?:add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|internal-set-repo-path|notice|remove-matcher"
    r"|save-state|set-env|set-output|stop-commands|warning)(?:\s|::))|##(?=\[)",
    re.IGNORECASE,
)
"""What begins a command of GitHub's runner: `::name` of those that it knows at the start of a line, and the older `##[`
anywhere in one (actions/runner, ActionCommand.cs and ActionCommandManager.cs)."""

_LONGEST = 1000
"""Characters of an error's sentence: more than any of our own has with ordinary names, and still read in one look."""
_TAIL = 300


def sanitise(text: str) -> str:
    r"""Return `text` with every character escaped that acts on a terminal or is not seen (`\x1b`, `\u202e`).

    Of what would begin a command of GitHub's runner the second character is escaped (`:\x3aerror`, `#\x23[group]`).
    """
    shown = "".join(_escaped(c) if _is_hidden(c) else c for c in text)
    return _COMMAND.sub(lambda found: found[0][0] + _escaped(found[0][1]), shown)


def is_seen(text: str) -> bool:
    """Whether anything of a text is seen where it is shown: it is not all spaces and characters without a shape."""
    return any(not c.isspace() and not _is_hidden(c) for c in text)


def sentence(text: str) -> str:
    """One line of bounded length, whatever names from outside stand in it: its beginning and its end are kept."""
    line = sanitise(text.strip())
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST - _TAIL - 5]} ... {line[-_TAIL:]}"


def sanitise_lines(text: str) -> str:
    """The same for text of several lines of our own or the user's making (a traceback): newlines and tabs stay."""
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
