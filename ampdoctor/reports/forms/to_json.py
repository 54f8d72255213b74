"""The JSON renderer: strict JSON with sorted keys, byte for byte the same for the same report.

The form is fixed by `report.schema.json` beside this file; a change that breaks readers raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from io import StringIO
from typing import Any

from ampdoctor.evidence.report import SCHEMA_VERSION, Finding, Prescription, Report
from ampdoctor.package import version
from ampdoctor.reports.words.paste import Setting, code_of, setting_of
from ampdoctor.reports.words.values import plain


def render_json(report: Report) -> str:
    """Return the report as JSON text (ASCII, two spaces of indent, a newline at the end)."""
    return strict_json(report_as_dict(report))


def strict_json(value: Any) -> str:
    """Return `value` as strict JSON text; see `plain` for what becomes of numbers."""
    encoder = json.JSONEncoder(indent=2, sort_keys=True, allow_nan=False, ensure_ascii=True)
    text = StringIO()  # `json.dumps` keeps every piece until the end: 400 MB more for 100,000 tensors
    text.writelines(encoder.iterencode(plain(value)))
    return _inert(text.getvalue()) + "\n"


def strict_json_line(value: Any) -> str:
    """The same in one line, for a stream of such."""
    return _inert(json.dumps(plain(value), sort_keys=True, allow_nan=False, ensure_ascii=True)) + "\n"


def _inert(text: str) -> str:
    """The same JSON without `##[`, which in a GitHub log begins a command wherever it stands; only strings hold it."""
    return text.replace("##[", "#\\u0023[")


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every report follows."""
    text = files("ampdoctor.reports").joinpath("report.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def report_as_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain JSON values."""
    setting = setting_of(report)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "ampdoctor", "version": version()},
        "command": report.command,
        "target": plain(report.target),
        "run": plain(report.run),
        "verdict": report.verdict,
        "complete": report.complete,
        "findings": [_finding(finding, setting) for finding in report.findings],
        "checks": plain(report.checks),
        "skipped": plain(report.skipped),
        "errors": plain(report.errors),
        "scaler": plain(report.scaler),
        "profile": plain(report.profile),
        "precision": plain(report.precision),
        "trend": plain(report.trend),
        "change": plain(report.change),
        "structure": plain(report.structure),
        "tensors": plain(report.tensors),
        "path": plain(report.path),
        "proof": plain(report.proof),
        "suppressed": [
            {"by": one.by, "reason": one.reason, "finding": _finding(one.finding, setting)} for one in report.suppressed
        ],
        "baseline": plain(report.baseline),
        "gate": plain(report.gate),
        "thresholds": plain(report.thresholds),
        "configuration": plain(report.configuration),
    }


def _finding(finding: Finding, setting: Setting) -> dict[str, Any]:
    prescription = finding.prescription
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "message": finding.message,
        "cause": finding.cause,
        "where": plain(finding.where),
        "also": [{key: getattr(place, key) for key in ("module", "op", "tensor", "file")} for place in finding.also],
        "evidence": plain(finding.evidence),
        "help": finding.help,
        "url": finding.url,
        "fingerprint": finding.fingerprint,
        "prescription": None if prescription is None else _prescription(prescription, setting, finding.cause),
    }


def _prescription(prescription: Prescription, setting: Setting, cause: str | None) -> dict[str, Any]:
    return {
        "kind": prescription.kind,
        "value": plain(prescription.value),
        "status": prescription.status,
        "reason": prescription.reason,
        "verified": prescription.verified,
        "detail": prescription.detail,
        "code": plain(code_of(prescription, setting, cause)),
        "alternatives": [_prescription(other, setting, cause) for other in prescription.alternatives],
    }
