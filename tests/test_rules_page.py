"""docs/rules.md is the catalogue as a page. After a change: `PYTHONPATH=. python tests/test_rules_page.py`."""

from __future__ import annotations

from pathlib import Path

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.where import Where

PAGE = Path(__file__).parent.parent / "docs" / "rules.md"
SECTIONS = (
    ("What it means", "meaning"),
    ("How it is decided", "decided"),
    ("Threshold", "threshold"),
    ("What to do", "action"),
    ("Where it is known to be wrong", "wrong"),
)

HEAD = ("| `--threshold` | default | unit | from, to | what it decides |", "| --- | --- | --- | --- | --- |")


def row(threshold):
    """Return a threshold as a row of its rule's table."""
    short = f", `{threshold.option}`" if threshold.option else ""
    span = f"{threshold.lowest:g}, {threshold.highest:g}"
    why = threshold.why.replace("|", r"\|")
    return f"| `{threshold.key}`{short} | {threshold.default:g} | {threshold.unit} | {span} | {why} |"


def rendered():
    parts = ["# Rules\n\nWhat each finding means. `ampdoctor rule CODE` shows the same in a terminal.\n"]
    for rule in RULES.values():
        parts.append(f'<a id="{rule.code.lower()}"></a>\n\n## {rule.code} {rule.name}\n\n{rule.title}.\n')
        for title, field in SECTIONS:
            parts.append(f"**{title}.** {getattr(rule, field)}\n")
            if field == "threshold" and rule.thresholds:
                parts.append("\n".join([*HEAD, *map(row, rule.thresholds)]) + "\n")
    return "\n".join(parts)


def test_the_page_is_the_catalogue():
    assert PAGE.read_text(encoding="utf-8") == rendered()


def test_a_finding_leads_to_its_rule():
    for code, rule in RULES.items():
        finding = Finding(code=code, name=rule.name, severity="note", message="", where=Where(phase="forward"))
        page, _, anchor = finding.url.partition("#")
        assert (PAGE.parent.parent / page) == PAGE
        assert f'<a id="{anchor}"></a>\n\n## {code} {rule.name}\n' in rendered()


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
