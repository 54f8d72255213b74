"""A rule's page is the source of all that is said about it; docs/rules.md is written from the pages.

After a change of a page: `PYTHONPATH=. python tests/test_rules_page.py`.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from ampdoctor.diagnosis import catalogue as page_module
from ampdoctor.diagnosis.catalogue import ALIASES, rules
from ampdoctor.diagnosis.health.rolling import MOST
from ampdoctor.diagnosis.health.step_state import SETTLING
from ampdoctor.evidence.thresholds import (
    ERROR_BAD,
    ERROR_NOTE,
    ERROR_WARNING,
    FLUSHED,
    FP32_SHARE,
    HORIZON,
    SKIP_RATE,
    Threshold,
)

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "rules.md"
FOLDER = ROOT / "docs" / "rules"
MARKUP = re.compile(r"([\\`*\[\]|]|(?<!\w)_|_(?!\w)|<(?=[a-zA-Z/!]))")
"""What Markdown would read as more than itself."""


def escaped(text):
    return MARKUP.sub(r"\\\1", text)


def index():
    rows = [
        f'| <a id="{rule.code.lower()}"></a>[{rule.code}](rules/{rule.code}.md) | {rule.name} | {rule.worst} '
        f"| {escaped(rule.title)} |"
        for rule in rules().values()
    ]
    aliases = ", ".join(f"{code} is [{now}](rules/{now}.md)" for code, now in ALIASES.items())
    return (
        "# Rules\n\n"
        "One page for each code that a finding can have. `ampdoctor rule CODE` shows the same in a terminal.\n\n"
        "| code | name | worst severity | in a line |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
        f"Of the codes that are gone, {aliases}.\n\n"
        "```{toctree}\n:hidden:\n:glob:\n\nrules/*\n```\n"
    )


def test_every_section_says_something():
    sections = [(rule.code, text) for rule in rules().values() for _, text in rule.page.sections]
    assert [code for code, text in sections if not text.endswith(".") or "\\" in text or "| ---" in text] == []


def examples():
    """The code of each rule that has an example, its commands, and both scripts."""
    for code, texts in ((rule.code, rule.page.texts) for rule in rules().values()):
        if "example" in texts:
            said, sick = texts["example"].split("\n\n", 1)
            *first, last = re.findall("`(.*?)`", said)
            commands = [command.split() for command in (*first, f"{last} --format json")]
            yield pytest.param((code, commands, (sick, texts["instead"].split("\n\n", 1)[1])), id=code)


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_has_its_finding_and_what_to_use_instead_has_none(example, run_cli, python, tmp_path):
    (code, commands, scripts), reports = example, []
    for name, script in zip(("sick", "cured"), scripts, strict=True):
        (folder := tmp_path / name).mkdir()
        (folder / "train.py").write_text(script)
        for program, *words in commands:
            done = run_cli(*words, command=(python,) if program == "python" else None, cwd=folder)
        reports.append(json.loads(done.stdout))
    assert len([line for line in scripts[0].splitlines() if line]) <= 12
    assert [report["errors"] for report in reports] == [[], []]
    assert code in {finding["code"] for finding in reports[0]["findings"]}
    assert (reports[1]["verdict"], reports[1]["findings"]) == ("healthy", [])


PAGE = """# AMP107 saturated-values

Values are clamped. Worst severity: error.

## What it means

Nothing.

## How it is decided

By \\_counting\\_.

## Threshold

Two.

| `--threshold` | default | unit | from, to | what it decides |
| --- | --- | --- | --- | --- |
| `AMP107.entries` | 3 | steps | 1, 1e+06 | Whole \\| numbers. |
| `AMP107.share` | 0.5 | share | 0, 1 | Half. |
| `AMP107.most` | 1.0 | share | 0, 1, not below `share` | All. |

## What to do

Nothing.

## Where it is known to be wrong

Nowhere.
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a page with this text."""
    monkeypatch.setattr(page_module, "_INSTALLED", tmp_path)

    def read_text(text):
        (tmp_path / "AMP107.md").write_text(text)
        return page_module.read_page.__wrapped__("AMP107")

    return read_text


def test_a_page_is_all_that_a_rule_says(read):
    page = read(PAGE)
    share = Threshold("AMP107", "share", 0.5, "share", why="Half.")
    assert (page.name, page.title, page.worst) == ("saturated-values", "Values are clamped", "error")
    assert page.sections[1:3] == (("How it is decided", "By _counting_."), ("Threshold", "Two."))
    assert list(page.thresholds.values()) == [
        Threshold("AMP107", "entries", 3, "steps", 1, 1_000_000, "Whole | numbers."),
        share,
        Threshold("AMP107", "most", 1.0, "share", why="All.", above=share),
    ]
    assert [threshold.whole for threshold in page.thresholds.values()] == [True, False, False]


@pytest.mark.parametrize(
    ("found", "instead", "said"),
    [
        ("# AMP107", "# AMP108", "expected '# AMP107 its-name', and 'Its title. Worst severity: error.' below it"),
        ("## Threshold", "## Limits", "expected the sections What it means, How it is decided, Threshold, What to do,"),
        (
            "Nowhere.\n",
            "Nowhere.\n\n## Example\n",
            "expected the sections What it means, How it is decided, Threshold,",
        ),
        ("| default |", "| value |", "expected a table that begins with '| `--threshold` | default |"),
        ("| 0.5 |", "| half |", "expected the five cells of a threshold of AMP107, not '| `AMP107.share` | half |"),
        ("not below `share`", "not below `least`", "expected the five cells of a threshold of AMP107, not"),
    ],
)
def test_a_malformed_page_is_refused_in_one_sentence(read, found, instead, said):
    with pytest.raises(ValueError, match=re.escape(f"AMP107.md: {said}")):
        read(PAGE.replace(found, instead))


def test_what_the_code_says_of_a_threshold_the_page_says_too():
    """Rooms below `diagnosis` know these by their numbers alone; two more stand in the code of their rules."""
    for known in (FLUSHED, ERROR_NOTE, ERROR_WARNING, ERROR_BAD, FP32_SHARE, SKIP_RATE, HORIZON):
        assert replace(rules()[known.code][known.name], why="", above=None) == known
    assert rules()["AMP740"]["settling"].default == SETTLING
    assert rules()["AMP724"]["norm"].highest == MOST


def test_a_wheel_carries_the_pages_where_they_are_looked_for():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (source, target), *others = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items()
    assert (ROOT / source, others) == (FOLDER, [])
    assert ROOT / target == page_module._INSTALLED
    assert page_module.pages_folder() == FOLDER


def test_the_index_is_the_catalogue():
    assert INDEX.read_text(encoding="utf-8") == index()
    assert {page.stem for page in FOLDER.iterdir()} == rules().keys()


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
