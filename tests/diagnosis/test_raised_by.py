"""Which commands look for what a rule finds, against the code that they reach."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ampdoctor.diagnosis.catalogue import RULES

PACKAGE = Path(__file__).parents[2] / "ampdoctor"
MODULES = {".".join(["ampdoctor", *p.relative_to(PACKAGE).with_suffix("").parts]): p for p in PACKAGE.rglob("*.py")}
ABOUT_THE_CONFIGURATION = {"AMP911", "AMP912"}


def reached(workflow):
    """The codes that stand in the modules that a workflow imports, directly or not, the pages aside."""
    seen, waiting, codes = set(), [f"ampdoctor.workflows.{workflow}"], set()
    while waiting:
        module = waiting.pop()
        if module in seen or "catalogue" in module:
            continue
        seen.add(module)
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                waiting += [name for name in names if name in MODULES]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                codes.update(re.findall(r"AMP\d{3}", node.value))
    return codes


def test_every_rule_is_raised_by_some_command():
    homeless = {code for code in RULES if not RULES[code].commands}
    assert homeless == ABOUT_THE_CONFIGURATION


@pytest.mark.parametrize("command", ["scan", "bisect-nan", "profile", "recommend"])
def test_a_command_reaches_the_rules_that_it_is_said_to_raise(command):
    codes = reached(command.replace("-", "_")) | (reached("scanning.against") if command == "scan" else set())
    said = {code for code in RULES if command in RULES[code].commands}
    assert said
    assert said <= codes
