"""A rule's page, docs/rules/CODE.md: what a person reads about a rule, read from there and written nowhere else."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

_INSTALLED = Path(__file__).with_name("pages")
"""Where the wheel puts docs/rules (pyproject.toml, force-include)."""
_IN_THE_TREE = Path(__file__).parents[3] / "docs" / "rules"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_ESCAPED = re.compile(r"\\([\\`*\[\]|_<])")

HEADINGS = ("What it means", "How it is decided", "Threshold", "What to do", "Where it is known to be wrong")
"""The sections of every page, in the order in which they are read and in that of the fields of `Page`."""


@dataclass(frozen=True, slots=True)
class Page:
    """The texts about a rule, each for the person who got the finding.

    Attributes:
        meaning: What a finding says, and what it does to training.
        decided: How it is decided, from which numbers.
        threshold: The threshold and why that one.
        action: What to do.
        wrong: Where it is known to be wrong, or silent.
    """

    meaning: str
    decided: str
    threshold: str
    action: str
    wrong: str

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Each (heading, text), in the order in which they are read."""
        return tuple(zip(HEADINGS, astuple(self), strict=True))


@cache
def read_page(code: str) -> Page:
    """Return the page of a rule; the same one is read once.

    Raises:
        FileNotFoundError: The rule has none.
        ValueError: Its sections are not those of `HEADINGS`.
    """
    file = pages_folder() / f"{code}.md"
    _, *parts = _HEADING.split(file.read_text(encoding="utf-8"))
    if tuple(parts[::2]) != HEADINGS:
        raise ValueError(f"{file}: expected the sections {', '.join(HEADINGS)}, in this order")
    return Page(*map(_prose, parts[1::2]))


def pages_folder() -> Path:
    """Return the folder of all pages: in an installed wheel beside this file, else in the source tree."""
    return _INSTALLED if _INSTALLED.is_dir() else _IN_THE_TREE


def _prose(section: str) -> str:
    """The section as plain text on one line, without its table."""
    lines = (line for line in section.splitlines() if not line.startswith("|"))
    return _ESCAPED.sub(r"\1", " ".join(" ".join(lines).split()))
