"""The JSON renderers: strict JSON with sorted keys, whole or a line an object; the same report gives the same bytes.

`report.schema.json` and `report-line.schema.json` beside this file define the forms; a change that breaks readers
raises `SCHEMA_VERSION`. The docstrings of the `Of...` classes are the schema's descriptions. Of JSON lines, the first
is a `report` with everything but the lists, then comes a line for each of their entries, and last a `summary` that
counts them: a stream without it has been cut. `read_json` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from io import StringIO
from typing import Annotated, Any, Literal

from ampdoctor.evidence.json_records import Text, form, to_plain
from ampdoctor.evidence.report import SCHEMA_VERSION, Finding, Prescription, Report
from ampdoctor.package import version
from ampdoctor.reports.fix_code import Code, TrainingContext, code_of, setting_of
from ampdoctor.reports.formats import RenderOptions

HEADER, SUMMARY = "report", "summary"  # types of the first and of the last line
LISTS: Mapping[str, str] = {
    "finding": "findings",
    "suppressed": "suppressed",
    "check": "checks",
    "skipped": "skipped",
    "error": "errors",
    "tensor": "tensors",
}
"""The type of a line, and the list of the JSON report that it belongs to, in the order of the lines."""


def render_json(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as JSON text (ASCII, two spaces of indent, a newline at the end)."""
    return strict_json(report_as_dict(report))


def render_jsonl(report: Report, _: RenderOptions | None = None) -> str:
    """Return the report as JSON lines (ASCII, keys sorted)."""
    header = report_as_dict(report)
    lists = {key: header.pop(key) for key in LISTS.values()}
    lines = [{"type": HEADER, **header}]
    lines += [{"type": kind, **entry} for kind, key in LISTS.items() for entry in lists[key] or ()]
    counts = {key: None if entries is None else len(entries) for key, entries in lists.items()}
    lines.append({"type": SUMMARY, "verdict": report.verdict, "complete": report.complete, **counts})
    return "".join(strict_json_line(line) for line in lines)


def strict_json(value: Any) -> str:
    """Return `value` as strict JSON text; `to_plain` converts the numbers."""
    encoder = json.JSONEncoder(indent=2, sort_keys=True, allow_nan=False, ensure_ascii=True)
    text = StringIO()  # `json.dumps` keeps every piece until the end: 400 MB more for 100,000 tensors
    text.writelines(encoder.iterencode(to_plain(value)))
    return _inert(text.getvalue()) + "\n"


def strict_json_line(value: Any) -> str:
    """Return the same in one line, for a stream of lines."""
    return _inert(json.dumps(to_plain(value), sort_keys=True, allow_nan=False, ensure_ascii=True)) + "\n"


def _inert(text: str) -> str:
    """Escape `##[`, which begins a command anywhere in a GitHub log; in JSON only strings contain it."""
    return text.replace("##[", "#\\u0023[")


def report_as_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain JSON values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "ampdoctor", "version": version()},
        **to_plain(replace(report, findings=(), suppressed=())),
        "findings": [_finding(finding, setting_of(report, finding)) for finding in report.findings],
        "suppressed": [
            {**to_plain(one), "finding": _finding(one.finding, setting_of(report, one.finding))}
            for one in report.suppressed
        ],
    }


def _finding(finding: Finding, setting: TrainingContext) -> dict[str, Any]:
    prescription = finding.prescription
    return {
        **to_plain(replace(finding, prescription=None)),
        "also": [{key: getattr(place, key) for key in ("module", "op", "tensor", "file")} for place in finding.also],
        "url": finding.url,
        "fingerprint": finding.fingerprint,
        "prescription": None if prescription is None else _prescription(prescription, setting, finding.cause),
    }


def _prescription(prescription: Prescription, setting: TrainingContext, cause: str | None) -> dict[str, Any]:
    return {
        **to_plain(replace(prescription, alternatives=())),
        "verified": prescription.verified,
        "code": to_plain(code_of(prescription, setting, cause)),
        "alternatives": [_prescription(other, setting, cause) for other in prescription.alternatives],
    }


# -- the JSON Schema of a report: made from its classes (tests/schemas.py), and shipped as a file beside this one --


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


DERIVED: Mapping[type, type] = {Report: OfReport, Finding: OfFinding, Prescription: OfPrescription}
"""What is written of a record beside its own fields: it follows from them."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every report follows."""
    text = files("ampdoctor.reports").joinpath("report.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
