"""A report with every field that the schema has, made from the schema: what a report from elsewhere may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ampdoctor.reports.json_report import schema

SCHEMA = schema()
_TEXTS = ("a text", "AMP201", "forward-overflow", "0123456789abcdef", "0x1.8p+1", "--steps")
"""One for each pattern of the schema."""
_DEEP = 12
"""Levels of values at which a list is left empty: a change has alternatives, which are changes."""

Path = tuple[str | int, ...]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where each part of a JSON value lies."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def every_field(key: str = "a.key", **chosen: Any) -> dict[str, Any]:
    """Return a report's JSON values with every field there is.

    Args:
        key: Stands in every object that takes keys which the schema does not name.
        chosen: Sections in place of those made from the schema.
    """
    made = _made(SCHEMA, key, 0)
    return {**made, "verdict": "sick", "complete": False, **chosen}


def _made(node: Mapping[str, Any], key: str, depth: int) -> Any:
    if "$ref" in node:
        return _made(_resolved(node["$ref"]), key, depth)
    if "anyOf" in node:
        return _made(node["anyOf"][0], key, depth)
    if "const" in node or "enum" in node:
        return node["const"] if "const" in node else node["enum"][0]
    wanted = node.get("type", "string")
    match wanted if isinstance(wanted, str) else wanted[0]:
        case "object":
            return _object(node, key, depth)
        case "array":
            count = max(node.get("minItems", 1), 1) if depth < _DEEP else 0
            return [_made(node.get("items", {}), key, depth + 1) for _ in range(count)]
        case "boolean":
            return True
        case "integer" | "number":
            return max(node.get("minimum", 1), 1)
        case _:
            return next(text for text in _TEXTS if re.fullmatch(node.get("pattern", ".*"), text))


def _object(node: Mapping[str, Any], key: str, depth: int) -> dict[str, Any]:
    made = {name: _made(field, key, depth + 1) for name, field in node.get("properties", {}).items()}
    names, others = node.get("propertyNames", {}), node.get("additionalProperties", True)
    if others is False:
        return made
    if others is True:
        values = {"": key, "1": 1.5, "2": True, "3": [key], "4": {key: key}, "5": None}
        return made | {f"{key}{end}": value for end, value in values.items()}
    return made | {_made(names, key, depth) if names else key: _made(others, key, depth + 1)}


def _resolved(reference: str) -> Mapping[str, Any]:
    node: Any = SCHEMA
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node
