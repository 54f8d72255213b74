"""A rule's page is its prose's source; its first lines and its table, and docs/rules.md, are the code's.

After a change of the code: `PYTHONPATH=. python tests/test_rules_page.py`, which leaves the prose alone.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ampdoctor.diagnosis import catalogue as page_module
from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "rules.md"
FOLDER = ROOT / "docs" / "rules"
HEAD = ("| `--threshold` | default | unit | from, to | what it decides |", "| --- | --- | --- | --- | --- |")
MARKUP = re.compile(r"([\\`*\[\]|]|(?<!\w)_|_(?!\w)|<(?=[a-zA-Z/!]))")
"""What Markdown would read as more than itself."""


def escaped(text):
    return MARKUP.sub(r"\\\1", text)


def row(threshold):
    """Return a threshold as a row of its rule's table."""
    span = f"{threshold.lowest:g}, {threshold.highest:g}"
    cells = (f"`{threshold.key}`", f"{threshold.default:g}", threshold.unit, span, escaped(threshold.why))
    return f"| {' | '.join(cells)} |"


def refreshed(rule, page):
    """The page with the first lines and the table that the code gives it."""
    head = f"# {rule.code} {rule.name}\n\n{escaped(rule.title)}. Worst severity: {rule.worst}.\n"
    table = "\n".join([*HEAD, *map(row, rule.thresholds)]) + "\n\n" if rule.thresholds else ""
    prose = "\n".join(line for line in page[page.index("## ") :].split("\n") if not line.startswith("|"))
    before, heading, after = re.sub(r"\n{3,}", "\n\n", prose).partition("## What to do\n")
    return f"{head}\n{before}{table}{heading}{after}"


def index():
    rows = [
        f'| <a id="{rule.code.lower()}"></a>[{rule.code}](rules/{rule.code}.md) | {rule.name} | {rule.worst} '
        f"| {escaped(rule.title)} |"
        for rule in rules().values()
    ]
    return (
        "# Rules\n\n"
        "One page for each code that a finding can have. `ampdoctor rule CODE` shows the same in a terminal.\n\n"
        "| code | name | worst severity | in a line |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
        "```{toctree}\n:hidden:\n:glob:\n\nrules/*\n```\n"
    )


@pytest.mark.parametrize("rule", list(rules().values()), ids=lambda rule: rule.code)
def test_the_page_is_the_rule(rule):
    page = (FOLDER / f"{rule.code}.md").read_text(encoding="utf-8")
    assert page == refreshed(rule, page)


@pytest.mark.parametrize("rule", list(rules().values()), ids=lambda rule: rule.code)
def test_every_section_says_something(rule):
    assert all(text.endswith(".") for _, text in rule.page.sections)
    assert not any("\\" in text or "| ---" in text for _, text in rule.page.sections)


def test_a_page_says_in_a_terminal_what_its_markdown_says():
    page = (FOLDER / "AMP105.md").read_text(encoding="utf-8")
    for heading, text in rules()["AMP105"].page.sections:
        assert f"## {heading}\n\n{escaped(text)}\n" in page


def test_a_page_with_other_sections_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "_INSTALLED", tmp_path)
    (tmp_path / "AMP107.md").write_text("# AMP107\n\n## What it means\n\nNothing.\n")
    with pytest.raises(ValueError, match=r"AMP107.md: expected the sections What it means, How"):
        page_module.read_page.__wrapped__("AMP107")


def test_a_wheel_carries_the_pages_where_they_are_looked_for():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (source, target), *others = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items()
    assert (ROOT / source, others) == (FOLDER, [])
    assert ROOT / target == page_module._INSTALLED
    assert page_module.pages_folder() == FOLDER


def test_the_index_is_the_catalogue():
    assert INDEX.read_text(encoding="utf-8") == index()
    assert {page.stem for page in FOLDER.iterdir()} == rules().keys()


def test_a_finding_leads_to_its_page():
    for code, rule in rules().items():
        finding = Finding(code=code, name=rule.name, severity="note", message="", where=Where(phase="forward"))
        assert (ROOT / finding.url) == FOLDER / f"{code}.md"


def rewrite():
    for rule in rules().values():
        page = FOLDER / f"{rule.code}.md"
        page.write_text(refreshed(rule, page.read_text(encoding="utf-8")), encoding="utf-8")
    INDEX.write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
