"""The pages of the JSON report and of a run's log, from the JSON Schemas that both are held against."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MARKER = "<!-- the schema goes here -->"
_PART = re.compile(r"#/\$defs/(\w+)")
PACKAGE = Path(__file__).parents[2] / "ampdoctor"
SCHEMA = PACKAGE / "reports" / "report.schema.json"
LOG_MARKER = "<!-- the log's schema goes here -->"
LOG_SCHEMA = PACKAGE / "evidence" / "run-log-line.schema.json"


def fill(_app: Any, _page: str, source: list[str]) -> None:
    """Put a schema's sections in the place of its marker; Sphinx calls this for every page that it reads."""
    if MARKER in source[0]:
        source[0] = source[0].replace(MARKER, rendered(_read(SCHEMA)))
    if LOG_MARKER in source[0]:
        source[0] = source[0].replace(LOG_MARKER, rendered_lines(_read(LOG_SCHEMA), _read(SCHEMA)))


def rendered(schema: Mapping[str, Any]) -> str:
    """One section for the report itself and one for each of its parts, as Markdown."""
    parts = {"The report": schema, **{f"`{name}`": part for name, part in sorted(schema["$defs"].items())}}
    return "\n\n".join(_section(title, part) for title, part in parts.items())


def rendered_lines(schema: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """One section for each kind of line, and for each part that a report does not have."""
    own = {name: part for name, part in schema["$defs"].items() if name not in report["$defs"]}
    return "\n\n".join(_section(f"`{name}`", part) for name, part in own.items())


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _section(title: str, part: Mapping[str, Any]) -> str:
    lines = [f"({_anchor(title)})=", f"## {title}", "", part.get("description", "")]
    if rows := list(_rows(part, "")):
        lines += ["", "| field | type | always there | what it is |", "| --- | --- | :-: | --- |", *rows]
    else:
        lines += ["", f"A value of type {_type(part)}."]
    return "\n".join(lines)


def _rows(part: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """A row for each field; the fields of an object within follow it, by their path."""
    required = part.get("required", ())
    for name, field in part.get("properties", {}).items():
        path = f"{prefix}{name}"
        always = "yes" if name in required else ""
        yield f"| `{path}` | {_type(field)} | {always} | {_cell(field.get('description', ''))} |"
        for inner, mark in _within(field):
            yield from _rows(inner, f"{path}{mark}.")


def _within(field: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The objects inside a field, and what leads to them: itself (null or not), its items, its values by name."""
    yield field, ""
    for mark, inner in (("[]", field.get("items")), (".NAME", field.get("additionalProperties"))):
        if isinstance(inner, Mapping):
            yield from ((deeper, f"{mark}{more}") for deeper, more in _within(inner))
    for option in field.get("anyOf", ()):
        yield from _within(option)


def _type(field: Mapping[str, Any]) -> str:
    """A field's type in words, with links to the parts that have a section of their own."""
    if match := _PART.fullmatch(field.get("$ref", "")):
        return f"[{match[1]}](#report-{match[1]})"
    if "$ref" in field:  # a field of a part
        *_, part, _, name = field["$ref"].split("/")
        return f"as `{name}` of [{part}](#report-{part})"
    if "const" in field:
        return f"`{_literal(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{_literal(value)}`" for value in field["enum"])
    for several in ("anyOf", "oneOf"):
        if several in field:
            return " or ".join(_type(option) for option in field[several])
    kinds = field.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_kind(kind, field) for kind in kinds)


def _kind(kind: str, field: Mapping[str, Any]) -> str:
    inner = field.get("items") if kind == "array" else field.get("additionalProperties") if kind == "object" else None
    if not isinstance(inner, Mapping) or not inner:
        return kind
    return f"array of {_type(inner)}" if kind == "array" else f"object of {_type(inner)} by name"


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _anchor(title: str) -> str:
    return f"report-{title.strip('`').lower().replace(' ', '-')}"
