"""Hold a value against the report's schema, and read it: the part of JSON Schema that ours is written in.

A report that is read back decides an exit code, so that it is read as strictly as it is written; jsonschema is a
dependency of the tests only, which hold the two against one another. Patterns have both ends, and as in JSON Schema the
last one is the text's own: `$` in Python would let a newline through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ampdoctor.errors import ReportError
from ampdoctor.reports.forms.schema import schema

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
    """Return a report's JSON values with the strings of non-finite numbers as floats, where the schema has numbers.

    Raises:
        ReportError: The value does not follow `report.schema.json`; the sentence names the first place.
    """
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
    """Hold the value itself against the keywords that do not speak of its parts."""
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
    """Read as the first that fits; else complain as the one does that came furthest."""
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
