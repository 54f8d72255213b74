"""The JSON Schema of a line: made from the classes, and shipped as a file beside this one."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from ampdoctor.evidence.codec import schema_of
from ampdoctor.evidence.run_log.lines import KINDS, SCHEMA_VERSION, Stamp

FILE = "run-log-line.schema.json"
_ABOUT = (
    "What this version writes; a reader passes by kinds and keys that it does not know. A key that is missing has its "
    "default, which is null unless the documentation says another. A non-finite number is the string NaN, Infinity or "
    "-Infinity."
)


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every line of a run's log follows."""
    loaded: dict[str, Any] = json.loads(files("ampdoctor.evidence.run_log").joinpath(FILE).read_text(encoding="utf-8"))
    return loaded


def schema_of_classes() -> dict[str, Any]:
    """Return the same, made anew; it needs docstrings, which `python -OO` takes away."""
    parts: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    for kind, record in KINDS.items():
        made = schema_of(record, {record: Stamp}, sparse=True)
        parts |= made.pop("$defs")
        made["properties"] = {"kind": {"const": kind}, **made["properties"]}
        made["properties"]["schema_version"] |= {"const": SCHEMA_VERSION}
        made["required"] = sorted({"kind", "schema_version", *made.get("required", ())})
        kinds[f"{kind}_line"] = made
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ampdoctor:run-log-line:{SCHEMA_VERSION}",
        "title": "A line of an ampdoctor run's log",
        "description": _ABOUT,
        "type": "object",
        "required": ["kind", "schema_version"],
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds],
        "$defs": dict(sorted((parts | kinds).items())),
    }
