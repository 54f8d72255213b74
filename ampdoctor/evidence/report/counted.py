"""A report whose steps are counted as the training counts them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from ampdoctor.evidence.report import Finding, Report
from ampdoctor.evidence.where import Source, Where

_IN_WORDS = re.compile(r"\bstep (\d+)\b")
"""How every sentence of ours names a step."""
_RAISED = r"\b\w*(?:Error|Exception|Exit|Interrupt|Warning): [^;]*"
"""An exception as sentences quote it, with its own text (`loop.raised.describe`), up to a semicolon."""


def counted_from(report: Report, first: int) -> Report:
    """Returns the report of a replay whose step 0 is the training's `first`, told in the training's steps.

    A recorded step has one number, its own; "step 0" of its replay means nothing to whoever trains. What the user has
    written stays as it is: names of modules, tensors and files, the text of an exception, and any number beyond the
    steps that were replayed, which is no replay's.
    """
    if first == 0:
        return report
    steps = report.run.get("steps")
    counting = _Counting(first, steps if type(steps) is int and steps > 0 else 1, frozenset(_names(report)))
    counted: Report = counting.of(report)
    return counted


class _Counting:
    """Adds the first step to each step of a report.

    Args:
        first: The training's number of the replay's step 0.
        steps: How many were replayed.
        names: Texts of the user's that speak of a step, which sentences quote.
    """

    def __init__(self, first: int, steps: int, names: frozenset[str]) -> None:
        self._first, self._steps = first, steps
        quoted = [re.escape(name) for name in sorted(names, key=len, reverse=True)]
        self._words = re.compile("|".join([*quoted, _RAISED, _IN_WORDS.pattern]))

    def of(self, value: Any) -> Any:
        """The value with its steps counted so, and its sentences."""
        if isinstance(value, str):
            return self._words.sub(self._said, value)
        if isinstance(value, Mapping):
            return {key: self._entry(key, item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self.of(item) for item in value)
        if not is_dataclass(value) or isinstance(value, type | Source):
            return value
        changed: dict[str, Any] = {}
        for one in fields(value):
            old = getattr(value, one.name)
            new = self._field(value, one.name, old)
            if new is not old and one.init:
                changed[one.name] = new
        return replace(value, **changed) if changed else value

    def _said(self, found: re.Match[str]) -> str:
        number = found[1]
        return found[0] if number is None or int(number) >= self._steps else f"step {int(number) + self._first}"

    def _field(self, owner: Any, name: str, old: Any) -> Any:
        if name == "global_step":
            return None  # said by the step itself
        if name == "step" and type(old) is int:
            return old + self._first
        if isinstance(owner, Where) and isinstance(old, str):
            return old
        if isinstance(owner, Finding) and name == "evidence":  # its "step" may be a counter that was saved
            return {key: item if key == "step" else self._figure(key, item) for key, item in old.items()}
        return old if isinstance(owner, Report) and name == "target" else self.of(old)

    def _entry(self, key: Any, item: Any) -> Any:
        return item + self._first if key == "step" and type(item) is int else self.of(item)

    def _figure(self, key: Any, item: Any) -> Any:
        """Part of the evidence: its texts are names, its steps are numbers."""
        if isinstance(item, Mapping):
            return {name: self._figure(name, one) for name, one in item.items()}
        if isinstance(item, tuple | list):
            all_steps = key == "steps" and all(type(one) is int for one in item)
            return type(item)(one + self._first if all_steps else self._figure("", one) for one in item)
        return item + self._first if key == "step" and type(item) is int else item


def _names(report: Report) -> Iterator[str]:
    """The user's texts that speak of a step and more: in addresses, in the evidence, in the target."""
    places = [asdict(place) for finding in report.found for place in finding.places]
    for text in _texts([report.target, places, [finding.evidence for finding in report.found]]):
        if _IN_WORDS.search(text) and not _IN_WORDS.fullmatch(text):
            yield text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
