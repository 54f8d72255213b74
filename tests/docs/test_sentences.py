"""Every sentence of the README and of the pages written by hand can be understood at the first reading: it is short."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS, ROOT

LONGEST = 25
"""Words in a sentence."""
GENERATED = {"cli.md", "rules.md"}
"""From the commands' help, and from the first lines of the rules' pages."""
NOT_PROSE = re.compile(r"^( *)```.*?^ *```$|<!--.*?-->|^#.*?$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) |\||<)")
"""Between two paragraphs, items of a list, rows of a table, or elements of HTML."""
CLAUSE = re.compile(r"(?:- )?(?:What|Whatever|Whoever|Whose)\b")
END = re.compile(r"(?<=[.!?])[\")*]*\s+")


def written_by_hand():
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in sorted(DOCS.rglob("*.md")) if page.name not in GENERATED),
    ]


def sentences(text):
    """The sentences of a page, without its code; a link is its text, and a piece of code is one word."""
    text = NOT_PROSE.sub("\n\n", text)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`+[^`]+`+", "`code`", text))
    for block in BLOCK.split(text):
        cells = block.split("|") if block.startswith("|") else [block]
        yield from (sentence for cell in cells for sentence in END.split(" ".join(cell.split())) if sentence)


def words(sentence):
    return len(re.findall(r"\S*\w\S*", sentence))


PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in written_by_hand()]


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_too_long(page):
    text = page.read_text(encoding="utf-8")
    assert [sentence for sentence in sentences(text) if words(sentence) > LONGEST] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_begins_with_a_relative_clause(page):
    found = [s for s in sentences(page.read_text(encoding="utf-8")) if CLAUSE.match(s) and not s.endswith("?")]
    assert found == []


def test_a_page_falls_into_its_sentences():
    page = "# Title\n\nOne `x. y` is [a\nlink](b.md). Two!\n\n- Three.\n- Four\n\n| five. | six |\n\n```py\n0\n```\n"
    assert list(sentences(page)) == ["One `code` is [a link].", "Two!", "- Three.", "- Four", "five.", "six"]
    assert words("1,000 steps - `code` (and more).") == 5
