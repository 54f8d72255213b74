"""The catalogue of rules: each code with what stands behind it; the rules themselves are functions beside it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from ampdoctor.diagnosis.catalogue.entries import ENTRIES
from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.errors import UsageError

RULES: Mapping[str, Rule] = MappingProxyType({rule.code: rule for rule in ENTRIES})
"""All rules by code, in the order of their codes."""

_A_WORD = 4
"""Letters from which a part of a name says something."""
_A_DIGIT = 0.8
"""Likeness of codes that differ in one digit, or in the order of two."""
_A_SLIP = 0.9
"""Likeness from which a name can only be that one."""
_MANY = 8
"""Rules that a sentence can offer."""


def find_rule(wanted: str) -> Rule:
    """The rule with a code or a name, in any case.

    Raises:
        UsageError: There is none; the sentence names near ones.
    """
    key = wanted.strip()
    for rule in RULES.values():
        if key.upper() == rule.code or key.lower() == rule.name:
            return rule
    near = _near(key)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `ampdoctor rule` lists them."
    raise UsageError(f"There is no rule {wanted!r}{hint}")


def _near(key: str) -> list[str]:
    """Codes that begin with the same digits, names with that word in them, else what is spelt nearly so."""
    digits, word = "".join(filter(str.isdecimal, key)), key.lower().replace("_", "-").replace(" ", "-")
    codes = [code for code in RULES if digits and code.startswith(f"AMP{digits}")]
    names = [rule.name for rule in RULES.values() if not digits and len(word) >= _A_WORD and word in rule.name]
    found = codes or names
    if not found and digits:
        found = difflib.get_close_matches(f"AMP{digits}", RULES, n=_MANY, cutoff=_A_DIGIT)
    elif not found:
        spelt = [rule.name for rule in RULES.values()]
        found = difflib.get_close_matches(word, spelt, n=1, cutoff=_A_SLIP) or difflib.get_close_matches(word, spelt)
    return found[:_MANY]
