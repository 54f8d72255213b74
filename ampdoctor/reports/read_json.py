"""Reads a report back from JSON or JSON lines; rendered again, it is the same.

Numbers come back as they were written: floats with 6 significant digits. Derived fields (`url`, `fingerprint`,
`verified`, the `code` to paste) are computed anew and not read. A non-finite number in the free form of `evidence`,
`target` or `headroom` stays a word, since a name may be that word. The keys of `run`, `target` and scaler settings get
their order for people back; those of `evidence` are sorted for people, too.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ampdoctor.errors import ReportError
from ampdoctor.evidence.json_records import DuplicateKeyError, from_plain, unique_keys
from ampdoctor.evidence.report import NOT_IN_HALF, SCHEMA_VERSION, STEPS_AFTER, Report, SkippedKind
from ampdoctor.reports.json_report import schema
from ampdoctor.reports.jsonl import HEADER, LISTS, SUMMARY
from ampdoctor.reports.text import RUN, SCALER, TARGET, in_order

# -- checking and reading a value by the report's schema: the part of JSON Schema that ours uses --
#
# A report that is read decides an exit code, so it is read as strictly as it is written; jsonschema is a dependency of
# the tests only, which compare the two. Patterns must match the whole text, as in our schema: `$` in Python would
# accept a newline at the end.

_Node = Mapping[str, Any]

_NONFINITE = ["NaN", "Infinity", "-Infinity"]
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0,
}


class _MismatchError(Exception):
    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(f"{path or 'the report'} {sentence}")
        self.depth = len(path)


def read_checked(value: Any) -> dict[str, Any]:
    """Return a report's JSON values, with non-finite words as floats; ReportError where the schema is not met."""
    try:
        read: dict[str, Any] = _read(value, _schema(), "")
    except _MismatchError as mismatch:
        raise ReportError(f"no report that this version reads: {mismatch}") from None
    return read


@cache
def _schema() -> _Node:
    return schema()


def _read(value: Any, node: _Node, path: str) -> Any:
    if "$ref" in node:
        value = _read(value, _resolved(node["$ref"]), path)
    if "anyOf" in node:
        value = _any_of(value, node["anyOf"], path)
    if node.get("enum") == _NONFINITE and value in _NONFINITE:
        return float(value)
    _check(value, node, path)
    if isinstance(value, dict):
        return _object(value, node, path)
    if isinstance(value, list) and "items" in node:
        return [_read(item, node["items"], f"{path}[{index}]") for index, item in enumerate(value)]
    return value


def _check(value: Any, node: _Node, path: str) -> None:
    wanted = node.get("type")
    names = [wanted] if isinstance(wanted, str) else wanted
    if names is not None and not any(_TYPES[name](value) for name in names):
        raise _MismatchError(path, f"is not of type {' or '.join(names)}")
    if "const" in node and not _same(value, node["const"]):
        raise _MismatchError(path, f"is {value!r}, not {node['const']!r}")
    if "enum" in node and not any(_same(value, one) for one in node["enum"]):
        raise _MismatchError(path, f"is {value!r}, not one of {', '.join(map(str, node['enum']))}")
    if isinstance(value, str):
        if len(value) < node.get("minLength", 0):
            raise _MismatchError(path, "is empty")
        if "pattern" in node and not re.fullmatch(node["pattern"], value):
            raise _MismatchError(path, f"is {value!r}, which is not of the form {node['pattern']}")
    elif isinstance(value, list):
        if not node.get("minItems", 0) <= len(value) <= node.get("maxItems", math.inf):
            raise _MismatchError(path, f"has {len(value)} entries")
    elif _TYPES["number"](value) and (value < node.get("minimum", -math.inf) or value > node.get("maximum", math.inf)):
        raise _MismatchError(path, f"is {value}, out of range")


def _object(value: dict[str, Any], node: _Node, path: str) -> dict[str, Any]:
    properties = node.get("properties", {})
    for key in node.get("required", ()):
        if key not in value:
            raise _MismatchError(_below(path, key), "is missing")
    for key in value:
        if "propertyNames" in node:
            _read(key, node["propertyNames"], f"the key {_below(path, key)}")
    others = node.get("additionalProperties", True)
    read = {}
    for key, item in value.items():
        if key in properties:
            read[key] = _read(item, properties[key], _below(path, key))
        elif others is False:
            raise _MismatchError(_below(path, key), "is not known")
        else:
            read[key] = item if others is True else _read(item, others, _below(path, key))
    if "if" in node:
        branch = "then" if _holds(read, node["if"]) else "else"
        _read(read, node.get(branch, {}), path)
    return read


def _any_of(value: Any, nodes: list[_Node], path: str) -> Any:
    """Read as the first node that fits; else raise the error of the one that came furthest."""
    mismatches = []
    for node in nodes:
        try:
            return _read(value, node, path)
        except _MismatchError as mismatch:
            mismatches.append(mismatch)
    raise max(mismatches, key=lambda mismatch: mismatch.depth)


def _holds(value: Any, node: _Node) -> bool:
    try:
        _read(value, node, "")
    except _MismatchError:
        return False
    return True


def _same(value: Any, constant: Any) -> bool:
    return isinstance(value, bool) == isinstance(constant, bool) and bool(value == constant)


@cache
def _resolved(reference: str) -> _Node:
    node: Any = _schema()
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    found: _Node = node
    return found


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


_CAME_LATER = {"health": None, "plan": None}  # sections that older reports of this version lack
_MAX_DEPTH = 100  # most nested levels; our reports have some ten, and reading or writing recurses at each


def report_from_text(text: str) -> Report:
    """Return the report in a JSON or JSONL text, decided by the first line; ReportError for any other text."""
    first, _, rest = text.lstrip().partition("\n")
    begun = _parsed(first)
    if isinstance(begun, dict) and begun.get("type") == HEADER:
        return report_from_dict(_joined(_loaded(first, "line 1"), rest))
    return report_from_dict(_loaded(text, "the text"))


def report_from_dict(data: Any) -> Report:
    """Return the report in the values of a JSON report; raises ReportError where they are none."""
    if _deeper(data, _MAX_DEPTH):
        raise ReportError(f"a report that is nested more than {_MAX_DEPTH} deep")
    if _beyond_floats(data):
        raise ReportError("no report of ampdoctor: it has an integer beyond the largest float")
    if not isinstance(data, dict) or "schema_version" not in data:
        raise ReportError("no report of ampdoctor: it has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        raise ReportError(
            f"a report of schema version {data['schema_version']}; this version of ampdoctor reads {SCHEMA_VERSION}"
        )
    report = _report(read_checked({**_CAME_LATER, **data}))
    _refuse_contradictions(report)
    return report


def _report(read: dict[str, Any]) -> Report:
    return from_plain(
        Report,
        {
            **read,
            "target": in_order(read["target"], TARGET),
            "run": in_order(read["run"], RUN),
            "scaler": _scaler(read["scaler"]),
            "findings": [_finding(finding) for finding in read["findings"]],
            "skipped": [{**one, "kind": _kind(one)} for one in read["skipped"]],
            "suppressed": [{**one, "finding": _finding(one["finding"])} for one in read["suppressed"]],
        },
    )


def _finding(read: dict[str, Any]) -> dict[str, Any]:
    """Read a finding; its further addresses are in the same part of a step."""
    return {**read, "also": [{"phase": read["where"]["phase"], **place} for place in read["also"]]}


def _kind(skipped: dict[str, Any]) -> SkippedKind:
    """Return the kind of a skipped part from its text, since a report has nothing else."""
    if skipped["what"].startswith(STEPS_AFTER):
        return "not_replayed"
    if skipped["what"] == NOT_IN_HALF:
        return "not_in_half"
    return "lfs_pointer" if "Git LFS pointer" in skipped["reason"] else "left_out"


def _scaler(read: dict[str, Any] | None) -> dict[str, Any] | None:
    if read is None:
        return None
    return read | {key: in_order(read[key], SCALER) for key in ("current", "recommended", "bounds") if read[key]}


def _refuse_contradictions(report: Report) -> None:
    """Refuse a report that no run can have produced, since it will decide an exit code."""
    # A suppressed finding counts as any other. A watched run that died is sick and may have no finding, but then it is
    # incomplete.
    found = (*report.findings, *(one.finding for one in report.suppressed))
    errors = any(finding.severity == "error" for finding in found)
    said = None
    if report.complete and report.errors:
        said = "it is complete, and something could not be examined"
    elif errors and report.verdict not in ("sick", "not_judged"):
        said = f"its verdict is {report.verdict}, and an error was found"
    elif report.verdict == "sick" and report.complete and not errors:
        said = "its verdict is sick, and no error was found"
    elif report.complete and not found and any(check.result == "found" for check in report.checks):
        said = "a check has found something, and no finding says what"
    if said is not None:
        raise ReportError(f"a report that contradicts itself: {said}")


def _joined(header: dict[str, Any], rest: str) -> dict[str, Any]:
    *texts, last = rest.rstrip().split("\n")
    summary = _parsed(last)
    if not isinstance(summary, dict) or summary.get("type") != SUMMARY:
        raise ReportError("the report has been cut: its last line is no summary")
    summary = _loaded(last, "the last line")
    for said in ("verdict", "complete"):
        if summary.get(said) != header.get(said):
            raise ReportError(
                f"a report that contradicts itself: the {said} of its summary is not that of its first line"
            )
    lines = [_loaded(text, f"line {number}") for number, text in enumerate(texts, 2)]
    lists: dict[str, list[Any]] = {key: [] for key in LISTS.values()}
    for number, line in enumerate(lines, 2):
        key = LISTS.get(str(line.pop("type", ""))) if isinstance(line, dict) else None
        if key is None:
            raise ReportError(f"line {number} is of no type that a report has")
        lists[key].append(line)
    for key, entries in lists.items():
        announced = summary.get(key) or 0
        if announced != len(entries):
            raise ReportError(f"the summary counts {announced} {key}, and {len(entries)} are there")
    whole = {key: value for key, value in header.items() if key != "type"}
    return whole | {key: None if summary.get(key) is None else entries for key, entries in lists.items()}


def _deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _deeper(one, levels - 1) for one in (value.values() if isinstance(value, dict) else value)
    )


def _beyond_floats(value: Any) -> bool:
    """Whether a value is or holds an integer too large for a float; readers may convert it to one."""
    if isinstance(value, dict | list):
        return any(map(_beyond_floats, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _loaded(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ReportError(f"{what} is nested too deeply") from None
    except DuplicateKeyError as error:
        raise ReportError(f"{what} has the key {error.key!r} twice in one object") from None
    except ValueError as error:
        raise ReportError(f"{what} is no JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
