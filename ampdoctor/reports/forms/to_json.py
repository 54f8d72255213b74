"""The JSON renderer: strict JSON with sorted keys, byte for byte the same for the same report.

The form is fixed by `report.schema.json` beside this file; a change that breaks readers raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.report import SCHEMA_VERSION, Finding, Prescription, Report
from ampdoctor.package import version
from ampdoctor.reports.forms.renderer import the_same_everywhere
from ampdoctor.reports.words.paste import Setting, code_of, setting_of


def render_json(report: Report) -> str:
    """Return the report as JSON text (ASCII, two spaces of indent, a newline at the end)."""
    return strict_json(report_as_dict(report))


def strict_json(value: Any) -> str:
    """Return `value` as strict JSON text; see `to_plain` for what becomes of numbers."""
    encoder = json.JSONEncoder(indent=2, sort_keys=True, allow_nan=False, ensure_ascii=True)
    text = StringIO()  # `json.dumps` keeps every piece until the end: 400 MB more for 100,000 tensors
    text.writelines(encoder.iterencode(to_plain(value)))
    return _inert(text.getvalue()) + "\n"


def strict_json_line(value: Any) -> str:
    """The same in one line, for a stream of such."""
    return _inert(json.dumps(to_plain(value), sort_keys=True, allow_nan=False, ensure_ascii=True)) + "\n"


def _inert(text: str) -> str:
    """The same JSON without `##[`, which in a GitHub log begins a command wherever it stands; only strings hold it."""
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


def _finding(finding: Finding, setting: Setting) -> dict[str, Any]:
    prescription = finding.prescription
    return {
        **to_plain(replace(finding, prescription=None)),
        "also": [{key: getattr(place, key) for key in ("module", "op", "tensor", "file")} for place in finding.also],
        "url": finding.url,
        "fingerprint": finding.fingerprint,
        "prescription": None if prescription is None else _prescription(prescription, setting, finding.cause),
    }


def _prescription(prescription: Prescription, setting: Setting, cause: str | None) -> dict[str, Any]:
    return {
        **to_plain(replace(prescription, alternatives=())),
        "verified": prescription.verified,
        "code": to_plain(code_of(prescription, setting, cause)),
        "alternatives": [_prescription(other, setting, cause) for other in prescription.alternatives],
    }


RENDERER = the_same_everywhere(render_json)
