"""docs/rules.md and docs/rules/ are the catalogue. After a change: `PYTHONPATH=. python tests/test_rules_page.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.where import Where

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
    short = f", `{threshold.option}`" if threshold.option else ""
    span = f"{threshold.lowest:g}, {threshold.highest:g}"
    cells = (f"`{threshold.key}`{short}", f"{threshold.default:g}", threshold.unit, span, escaped(threshold.why))
    return f"| {' | '.join(cells)} |"


def rendered(rule):
    parts = [f"# {rule.code} {rule.name}\n\n{escaped(rule.title)}. Worst severity: {rule.worst}.\n"]
    for title, text in rule.sections:
        parts.append(f"## {title}\n\n{escaped(text)}\n")
        if title == "Threshold" and rule.thresholds:
            parts.append("\n".join([*HEAD, *map(row, rule.thresholds)]) + "\n")
    return "\n".join(parts)


def index():
    rows = [
        f'| <a id="{rule.code.lower()}"></a>[{rule.code}](rules/{rule.code}.md) | {rule.name} | {rule.worst} '
        f"| {escaped(rule.title)} |"
        for rule in RULES.values()
    ]
    return (
        "# Rules\n\n"
        "One page for each code that a finding can have. `ampdoctor rule CODE` shows the same in a terminal.\n\n"
        "| code | name | worst severity | in a line |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
        "```{toctree}\n:hidden:\n:glob:\n\nrules/*\n```\n"
    )


@pytest.mark.parametrize("rule", list(RULES.values()), ids=lambda rule: rule.code)
def test_the_page_is_the_rule(rule):
    assert (FOLDER / f"{rule.code}.md").read_text(encoding="utf-8") == rendered(rule)


def test_the_index_is_the_catalogue():
    assert INDEX.read_text(encoding="utf-8") == index()
    assert {page.stem for page in FOLDER.iterdir()} == RULES.keys()


def test_a_finding_leads_to_its_page():
    for code, rule in RULES.items():
        finding = Finding(code=code, name=rule.name, severity="note", message="", where=Where(phase="forward"))
        assert (ROOT / finding.url) == FOLDER / f"{code}.md"


def rewrite():
    FOLDER.mkdir(exist_ok=True)
    for page in FOLDER.iterdir():
        page.unlink()
    for rule in RULES.values():
        (FOLDER / f"{rule.code}.md").write_text(rendered(rule), encoding="utf-8")
    INDEX.write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
