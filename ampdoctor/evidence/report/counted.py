"""A report whose steps are counted as the training counts them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ampdoctor.evidence.report import Report

_IN_WORDS = re.compile(r"\bstep (\d+)\b")
"""How every sentence of ours names a step."""
_FIELDS = frozenset({"step"})


def counted_from(report: Report, first: int) -> Report:
    """Returns the report of a replay whose step 0 is the training's `first`, told in the training's steps.

    A recorded step has one number, its own; "step 0" of its replay means nothing to whoever trains.
    """
    counted: Report = report if first == 0 else _counted(report, first)
    return counted


def _counted(value: Any, first: int) -> Any:
    if isinstance(value, str):
        return _IN_WORDS.sub(lambda found: f"step {int(found[1]) + first}", value)
    if isinstance(value, Mapping):
        return {key: _counted(item, first) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_counted(item, first) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed: dict[str, Any] = {}
    for one in fields(value):
        old = getattr(value, one.name)
        number = one.name in _FIELDS and isinstance(old, int) and not isinstance(old, bool)
        new = old + first if number else _counted(old, first)
        if one.name == "global_step":
            new = None  # said by the step itself
        if new is not old and one.init:
            changed[one.name] = new
    return replace(value, **changed) if changed else value
