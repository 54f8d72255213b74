"""The JSON Schemas of a report: made from the classes that it consists of, and shipped as files beside this room."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal

from ampdoctor.evidence.json_records import Text, form, schema_of
from ampdoctor.evidence.report import SCHEMA_VERSION, Finding, Prescription, Report
from ampdoctor.reports.words.paste import Code


@dataclass(frozen=True, slots=True)
class Tool:
    """Who made the report.

    Attributes:
        name: Always ampdoctor.
        version: The version, as --version prints it.
    """

    name: Literal["ampdoctor"]
    version: Text


@dataclass(frozen=True, slots=True)
class OfReport:
    """What is written of a report beside its own fields.

    Attributes:
        schema_version: Changes where a reader of the last one would break.
        tool: Who made the report.
    """

    schema_version: Annotated[str, form(const=SCHEMA_VERSION)]
    tool: Tool


@dataclass(frozen=True, slots=True)
class OfFinding:
    """What is written of a finding beside its own fields.

    Attributes:
        url: The rule's page in the repository's documentation.
        fingerprint: Of code, module, op and tensor: the same in another run, step or with other values. Of several
            addresses, what they have in common.
    """

    url: Annotated[str, form(format="uri-reference")]
    fingerprint: Annotated[str, form(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True, slots=True)
class OfPrescription:
    """What is written of a prescription beside its own fields.

    Attributes:
        verified: True only for the status verified.
        code: Lines of Python to paste: with ampdoctor.apply, and the same in plain torch; [] where there are none.
    """

    verified: bool
    code: Code


_ABOUT = (
    "What every ampdoctor command returns with --format json. Fractions run from 0 to 1; a non-finite number is the "
    "string NaN, Infinity or -Infinity."
)
_VERIFIED = {"if": {"properties": {"status": {"const": "verified"}}}} | {
    branch: {"properties": {"verified": {"const": value}}} for branch, value in (("then", True), ("else", False))
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every report follows."""
    text = files("ampdoctor.reports").joinpath("report.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def schema_of_classes() -> dict[str, Any]:
    """Return the same, made anew; it needs docstrings, which `python -OO` takes away."""
    made = schema_of(Report, {Report: OfReport, Finding: OfFinding, Prescription: OfPrescription})
    made["$defs"]["prescription"] |= _VERIFIED  # a status and what it means cannot contradict each other
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:ampdoctor:report:{SCHEMA_VERSION}"}
    return {**head, "title": "ampdoctor report", **made, "description": _ABOUT}
