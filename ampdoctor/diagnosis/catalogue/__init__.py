"""The catalogue of rules: every rule that a module of `diagnosis` registers, and what they find together."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ampdoctor.diagnosis.catalogue.rule import FINDERS, REGISTERED, Rule
from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Finding, finding_order
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds

_A_WORD = 4
"""Letters from which a part of a name says something."""
_A_DIGIT = 0.8
"""Likeness of codes that differ in one digit, or in the order of two."""
_A_SLIP = 0.9
"""Likeness from which a name can only be that one."""
_MANY = 8
"""Rules that a sentence can offer."""


@cache
def rules() -> Mapping[str, Rule]:
    """Return all rules by code, in the order of their codes; the first call imports every module of `diagnosis`."""
    folder = Path(__file__).parents[1]
    for module in pkgutil.walk_packages([str(folder)], "ampdoctor.diagnosis."):
        importlib.import_module(module.name)
    return MappingProxyType(dict(sorted(REGISTERED.items())))


def judge(evidence: Any, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Finding, ...]:
    """Return what every rule on this kind of evidence finds, worst first.

    Args:
        evidence: A `CheckpointSummary`, a `CheckpointChange` or a `Trend`.
        thresholds: What counts as harmful, as too many.
    """
    rules()
    finders = sorted(FINDERS[type(evidence)], key=itemgetter(0))
    found = (finding for _, find in finders for finding in find(evidence, thresholds))
    return tuple(sorted(found, key=finding_order))


def codes_in(storey: str) -> frozenset[str]:
    """Return the codes of the rules whose files lie in this folder of `diagnosis` and that judge by themselves."""
    rules()
    inside = f"ampdoctor.diagnosis.{storey}."
    return frozenset(code for of in FINDERS.values() for code, find in of if find.__module__.startswith(inside))


def find_rule(wanted: str) -> Rule:
    """The rule with a code or a name, in any case.

    Raises:
        UsageError: There is none; the sentence names near ones.
    """
    key = wanted.strip()
    for rule in rules().values():
        if key.upper() == rule.code or key.lower() == rule.name:
            return rule
    near = _near(key)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `ampdoctor rule` lists them."
    raise UsageError(f"There is no rule {wanted!r}{hint}")


def _near(key: str) -> list[str]:
    """Codes that begin with the same digits, names with that word in them, else what is spelt nearly so."""
    digits, word = "".join(filter(str.isdecimal, key)), key.lower().replace("_", "-").replace(" ", "-")
    codes = [code for code in rules() if digits and code.startswith(f"AMP{digits}")]
    names = [rule.name for rule in rules().values() if not digits and len(word) >= _A_WORD and word in rule.name]
    found = codes or names
    if not found and digits:
        found = difflib.get_close_matches(f"AMP{digits}", rules(), n=_MANY, cutoff=_A_DIGIT)
    elif not found:
        spelt = [rule.name for rule in rules().values()]
        found = difflib.get_close_matches(word, spelt, n=1, cutoff=_A_SLIP) or difflib.get_close_matches(word, spelt)
    return found[:_MANY]
