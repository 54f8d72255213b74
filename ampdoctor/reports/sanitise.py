"""Make text that came from outside (tensor and module names, paths, messages) harmless to show.

A name in a checkpoint is chosen by whoever wrote the file: escape sequences in it could rewrite a terminal,
bidirectional controls could reorder a line, a newline could forge one.
"""

from __future__ import annotations

import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that act on a terminal or cannot be seen or encoded: controls, format characters (among them the
bidirectional ones), surrogates, line and paragraph separators."""


_LONGEST = 1000
"""Characters of an error's sentence: more than any of our own has with ordinary names, and still read in one look."""
_TAIL = 300


def sanitise(text: str) -> str:
    r"""Return `text` with every control, format, surrogate and separator character escaped (`\x1b`, `\u202e`)."""
    return "".join(_escaped(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def sentence(text: str) -> str:
    """One line of bounded length, whatever names from outside stand in it: its beginning and its end are kept."""
    line = sanitise(text.strip())
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST - _TAIL - 5]} ... {line[-_TAIL:]}"


def sanitise_lines(text: str) -> str:
    """The same for text of several lines of our own or the user's making (a traceback): newlines and tabs stay."""
    return "\n".join(sanitise(line.expandtabs(4)) for line in text.split("\n"))


def _escaped(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
