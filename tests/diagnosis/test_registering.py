"""Which commands look for what a rule finds, against the code that they reach."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from ampdoctor.diagnosis.catalogue import FINDERS, SCANNED, rule, rules
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, CheckpointSummary, Trend

PACKAGE = Path(__file__).parents[2] / "ampdoctor"


def judging(kind):
    """The codes of the rules on a kind of evidence."""
    rules()
    return [code for code, _ in FINDERS[kind]]


MODULES = {".".join(["ampdoctor", *p.relative_to(PACKAGE).with_suffix("").parts]): p for p in PACKAGE.rglob("*.py")}
JUDGED = [(kind, code) for kind in (CheckpointSummary, CheckpointChange, Trend) for code in judging(kind)]
"""What a scan has judged, each kind with the codes of the rules on it."""
ABOUT_THE_CONFIGURATION = {"AMP911", "AMP912"}


@cache
def imported_and_named(module):
    """The modules that a module imports, and the codes that stand in it."""
    names, codes = [], set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            codes.update(re.findall(r"AMP\d{3}", node.value))
    return [name for name in names if name in MODULES], codes


def reached(workflow):
    """The codes that stand in the modules that a workflow imports, directly or not, the pages aside."""
    seen, waiting, codes = set(), [f"ampdoctor.workflows.{workflow}"], set()
    while waiting:
        module = waiting.pop()
        if module not in seen and "catalogue" not in module and "thresholds" not in module:
            seen.add(module)
            names, named = imported_and_named(module)
            waiting += names
            codes |= named
    return codes


def test_every_rule_is_raised_by_some_command():
    homeless = {code for code in rules() if not rules()[code].commands}
    assert homeless == ABOUT_THE_CONFIGURATION


@pytest.mark.parametrize("command", ["scan", "bisect-nan", "profile", "recommend"])
def test_a_command_reaches_the_rules_that_it_is_said_to_raise(command):
    codes = reached(command.replace("-", "_")) | ({code for _, code in JUDGED} if command == "scan" else set())
    said = {code for code in rules() if command in rules()[code].commands}
    assert said
    assert said <= codes


def test_what_a_scan_has_judged_is_said_to_be_raised_by_it():
    assert {code for _, code in JUDGED} == {code for code, rule in rules().items() if "scan" in rule.commands}


def test_a_code_is_registered_once():
    with pytest.raises(ValueError, match="AMP107 is registered twice"):
        rule("AMP107", SCANNED)


REGISTERED = re.compile(r'= rule\("(AMP\d{3})"')
NAMED = re.compile(r'^(\w+) = rule\("(AMP\d{3})"', re.MULTILINE)


def test_a_rule_is_named_for_its_name():
    """`NAME_OF_THE_RULE = rule(...)`; `RULE` in a file that holds one rule."""
    named = [found for path in MODULES.values() for found in NAMED.findall(path.read_text(encoding="utf-8"))]
    assert sorted(code for _, code in named) == list(rules())
    names = {code: rule.name.replace("-", "_").upper() for code, rule in rules().items()}
    assert [(name, code) for name, code in named if name.removesuffix("_RULE") not in {"RULE", names[code]}] == []


def test_a_rule_judges_in_its_own_file():
    files = {code: module for module, path in MODULES.items() for code in REGISTERED.findall(path.read_text("utf-8"))}
    files_of_finders = {(code, find.__module__) for finders in FINDERS.values() for code, find in finders}
    saved_losses = {("AMP722", "ampdoctor.diagnosis.scan.tensors")}  # a loss that lies among a checkpoint's tensors
    assert {(code, module) for code, module in files_of_finders if module != files[code]} == saved_losses
