"""The JSON Schemas that are shipped, made from the classes of the records and their docstrings.

`tests/reports/forms/test_schema.py` and `tests/evidence/run_log/test_schema.py` hold the files to them, and write them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from inspect import cleandoc
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, is_typeddict

from ampdoctor.evidence.json_records import Form, Shape, _members, _split
from ampdoctor.evidence.log_records import KINDS, Stamp
from ampdoctor.evidence.log_records import SCHEMA_VERSION as LOG_VERSION
from ampdoctor.evidence.report import SCHEMA_VERSION, Report
from ampdoctor.reports.json_report import DERIVED

_NUMBER = {
    "description": "A float; a non-finite one is a string.",
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
}
_ABOUT = (
    "What every ampdoctor command returns with --format json. Fractions run from 0 to 1; a non-finite number is the "
    "string NaN, Infinity or -Infinity."
)
_VERIFIED = {"if": {"properties": {"status": {"const": "verified"}}}} | {
    branch: {"properties": {"verified": {"const": value}}} for branch, value in (("then", True), ("else", False))
}
_OF_A_LINE = (
    "What this version writes; a reader passes by kinds and keys that it does not know. A key that is missing has its "
    "default, which is null unless the documentation says another. A non-finite number is the string NaN, Infinity or "
    "-Infinity."
)


def schema_of(record, more=None, *, sparse=False):
    """Return the JSON Schema of a record, with the records in it as parts (`$defs`).

    `more` maps the class of a record to another one, whose keys are written beside its own because they follow from
    them. `sparse` is for records that leave out defaults.
    """
    made = _Schema(more or {}, sparse=sparse)
    node = made.record(record)
    return {**node, "$defs": dict(sorted(made.parts.items()))}


class _Schema:
    def __init__(self, more, *, sparse):
        self._more = more
        self._sparse = sparse
        self.parts = {}
        self._records = {}

    def of(self, hint):
        """The node of a type."""
        kind, note = _split(hint)
        origin, parts = get_origin(kind), get_args(kind)
        if isinstance(note, Shape) and not (self._sparse and is_dataclass(kind)):  # a sparse record is written whole
            return self.of(note.like)
        if isinstance(note, Form):
            node = ({} if kind is float else self.of(kind)) | dict(note.keywords)
            return self._named(note.name, node) if note.name else node
        if is_dataclass(kind) or is_typeddict(kind):
            return self._part(kind)
        if origin is Literal:
            return {"enum": list(parts)} if len(parts) > 1 else {"const": parts[0]}
        if origin in (Union, UnionType):
            inner = self.of(next(part for part in parts if part is not NoneType))
            simple = set(inner) == {"type"}
            return {"type": [inner["type"], "null"]} if simple else {"anyOf": [inner, {"type": "null"}]}
        if origin in (tuple, Sequence):
            length = (
                {} if origin is Sequence or parts[1:] == (...,) else {"minItems": len(parts), "maxItems": len(parts)}
            )
            return {"type": "array", "items": self.of(parts[0]), **length}
        if origin is Mapping:
            names = self.of(parts[0])
            keys = {} if names == {"type": "string"} else {"propertyNames": names}
            others = {} if parts[1] is Any else {"additionalProperties": self.of(parts[1])}
            return {"type": "object", **keys, **others}
        if kind is float:
            return self._named("number", _NUMBER)
        return {} if kind is Any else {"type": _TYPES[kind]}

    def record(self, record):
        """The node of a record itself."""
        properties, required = self._properties(record)
        if record in self._more:
            derived, of_derived = self._properties(self._more[record])
            properties, required = {**derived, **properties}, required + of_derived
        closed = {} if is_typeddict(record) else {"additionalProperties": False}
        needed = {"required": sorted(required)} if required else {}
        return {"description": _summary(record), "type": "object", "properties": properties, **needed, **closed}

    def _properties(self, record):
        said = _descriptions(record)
        members, required = _members(record, sparse=self._sparse)
        return {key: {"description": said[name], **self.of(hint)} for key, (name, hint) in members.items()}, required

    def _part(self, record):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", record.__name__.removesuffix("Section")).lower()
        if self._records.setdefault(name, record) is not record:
            raise ValueError(f"two records are called {name}")
        if name not in self.parts:
            self.parts[name] = {}  # a record may hold others of its own class
            self.parts[name] = self.record(record)
        return {"$ref": f"#/$defs/{name}"}

    def _named(self, name, node):
        self.parts[name] = node
        return {"$ref": f"#/$defs/{name}"}


_TYPES = {str: "string", int: "integer", bool: "boolean", dict: "object"}


def _summary(record):
    return " ".join(cleandoc(record.__doc__ or "").partition("\n\n")[0].split())


def _descriptions(record):
    """The description of each attribute in a docstring; two in one line ("old, new: Their names.") share theirs."""
    text = cleandoc(record.__doc__ or "").partition("Attributes:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     +.*)*)", text, re.MULTILINE)
    return {
        name: re.sub(r"\bNone\b", "null", " ".join(said.split())) for names, said in found for name in names.split(", ")
    }


def of_report():
    """The schema that every report follows."""
    made = schema_of(Report, DERIVED)
    made["$defs"]["prescription"] |= _VERIFIED  # a status and `verified` cannot contradict each other
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:ampdoctor:report:{SCHEMA_VERSION}"}
    return {**head, "title": "ampdoctor report", **made, "description": _ABOUT}


def of_a_line_of_a_log():
    """The schema that every line of a run's log follows."""
    parts = {}
    kinds = {}
    for kind, record in KINDS.items():
        made = schema_of(record, {record: Stamp}, sparse=True)
        parts |= made.pop("$defs")
        made["properties"] = {"kind": {"const": kind}, **made["properties"]}
        made["properties"]["schema_version"] |= {"const": LOG_VERSION}
        made["required"] = sorted({"kind", "schema_version", *made.get("required", ())})
        kinds[f"{kind}_line"] = made
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ampdoctor:run-log-line:{LOG_VERSION}",
        "title": "A line of an ampdoctor run's log",
        "description": _OF_A_LINE,
        "type": "object",
        "required": ["kind", "schema_version"],
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds],
        "$defs": dict(sorted((parts | kinds).items())),
    }
