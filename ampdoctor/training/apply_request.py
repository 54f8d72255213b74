"""Reads the argument of `apply`: a prescription, a finding, a report, the JSON of one of these, or its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import (
    SCHEMA_VERSION,
    Finding,
    Prescription,
    PrescriptionKind,
    PrescriptionStatus,
    Report,
)

_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}
_NOT_PROVED = {
    "failed": "a replay showed that it does not cure",
    "worse": "a replay showed that it makes things worse",
    "intervention": "it was only tried as an intervention: the code itself is yours to change",
    "not_run": "it was not replayed",
}
_USELESS = ("failed", "worse")


@dataclass(frozen=True, slots=True)
class ApplyRequest:
    """The changes to make."""

    changes: tuple[Prescription, ...]  # at most one of each kind
    left_out: tuple[str, ...] = ()  # the other changes, each with the reason why it is not applied


def wanted_of(source: Any, *, unverified: bool) -> ApplyRequest:
    """Returns the changes of the source of `apply`; UsageError where it is unreadable, empty or contradictory."""
    if isinstance(source, str | os.PathLike):
        return _of_object(_read(source), str(os.fspath(source)), unverified=unverified)
    return _of_object(source, "the prescription", unverified=unverified)


def _of_object(source: Any, name: str, *, unverified: bool) -> ApplyRequest:
    if isinstance(source, Report):
        pairs = [(finding.code, finding.prescription) for finding in source.findings]
        return _of_report(pairs, f"the report of {source.command}", source.verdict, unverified=unverified)
    if isinstance(source, Finding):
        return _alone(source.prescription, f"finding {source.code}", unverified=unverified)
    if isinstance(source, Prescription):
        return _alone(source, name, unverified=unverified)
    if not isinstance(source, Mapping):
        raise UsageError(
            f"apply takes a prescription, a finding or a report, its JSON object or the path of a JSON report, "
            f"not {type(source).__name__}"
        )
    if "findings" in source:
        return _of_report(*_pairs(source, name), unverified=unverified)
    if "prescription" in source:
        label = f"finding {source.get('code', '')}".rstrip()
        return _alone(_prescription(source["prescription"], label), label, unverified=unverified)
    return _alone(_prescription(source, name), name, unverified=unverified)


def _read(path: str | os.PathLike[str]) -> Any:
    name = str(os.fspath(path))
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the report {name} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UsageError(
            f"{name} is not the JSON that `ampdoctor bisect-nan FACTORY --report json=FILE` writes"
        ) from None


def _pairs(report: Mapping[str, Any], name: str) -> tuple[list[tuple[str, Prescription | None]], str, str]:
    version = report.get("schema_version", SCHEMA_VERSION)
    findings = report["findings"]
    if version != SCHEMA_VERSION:
        raise UsageError(f"{name} is a report of schema version {version!r}; this ampdoctor reads {SCHEMA_VERSION!r}")
    if not isinstance(findings, list) or not all(isinstance(finding, Mapping) for finding in findings):
        raise UsageError(f"the findings of {name} are no list of JSON objects")
    pairs = []
    for finding in findings:
        code = str(finding.get("code", "a finding"))
        pairs.append((code, _prescription(finding.get("prescription"), f"{name}, {code}")))
    return pairs, name, str(report.get("verdict", "unknown"))


def _prescription(value: Any, name: str) -> Prescription | None:
    """Reads a prescription's JSON object, or raises UsageError; without a status it is the caller's, and verified."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or "kind" not in value or "value" not in value:
        raise UsageError(
            f'{name} is no prescription: that is an object like {{"kind": "fp32_modules", "value": [...]}}'
        )
    kind, status = value["kind"], value.get("status", "verified")
    if kind not in get_args(PrescriptionKind):
        raise UsageError(f"{name} has the kind {kind!r}, which is none of {', '.join(get_args(PrescriptionKind))}")
    if status not in get_args(PrescriptionStatus):
        raise UsageError(f"{name} has the status {status!r}, none of {', '.join(get_args(PrescriptionStatus))}")
    reason, detail = (str(value.get(key) or "") for key in ("reason", "detail"))
    return Prescription(kind=kind, value=value["value"], status=status, reason=reason or None, detail=detail)


def _alone(prescription: Prescription | None, name: str, *, unverified: bool) -> ApplyRequest:
    if prescription is None:
        raise UsageError(f"{name} has no prescription: there is nothing to apply")
    if not prescription.verified and not unverified:
        raise UsageError(
            f"{_what(prescription)} is not verified ({_why_not(prescription)}); "
            f"apply(..., unverified=True) applies it all the same"
        )
    return ApplyRequest((prescription,))


def _of_report(
    pairs: list[tuple[str, Prescription | None]], name: str, verdict: str, *, unverified: bool
) -> ApplyRequest:
    changes: dict[str, Prescription] = {}
    left_out = []
    for code, prescription in pairs:
        if prescription is None:
            continue
        if prescription.status in _USELESS or not (prescription.verified or unverified):
            left_out.append(f"{code}: {_what(prescription)} is not verified ({_why_not(prescription)})")
        elif prescription.kind in ("skip_batch", "code"):
            left_out.append(f"{code}: {yours(prescription)}")
        else:
            known = changes.get(prescription.kind)
            changes[prescription.kind] = prescription if known is None else _both(known, prescription, name)
    if "dtype" in changes:
        needless = [kind for kind in ("init_scale", "scaler") if changes.pop(kind, None) is not None]
        left_out += [f"{kind}: {changes['dtype'].value} needs no loss scale" for kind in needless]
        if dtype_of(changes["dtype"].value) is torch.float32 and changes.pop("fp32_modules", None) is not None:
            left_out.append("fp32_modules: float32 for the whole model does that already")
    if {"init_scale", "scaler"} <= changes.keys():
        raise _two_things(changes["init_scale"], changes["scaler"], name)
    if not changes:
        why = f": {left_out[0]}" if left_out else f" (its verdict is {verdict})"
        raise UsageError(f"{name} has no change that apply can make{why}")
    return ApplyRequest(tuple(changes.values()), tuple(left_out))


def _both(one: Prescription, other: Prescription, name: str) -> Prescription:
    if one.value == other.value:
        return one
    if one.kind == "fp32_modules" and _are_names(one.value) and _are_names(other.value):
        names = tuple(dict.fromkeys((*one.value, *other.value)))
        return Prescription(kind=one.kind, value=names, status=other.status, detail=f"run {', '.join(names)} in fp32")
    raise _two_things(one, other, name)


def _two_things(one: Prescription, other: Prescription, name: str) -> UsageError:
    return UsageError(
        f"{name} asks for {_what(one)} and for {_what(other)}: hand apply the finding whose change you want"
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def dtype_of(value: Any) -> torch.dtype | None:
    """Returns the dtype of a `dtype` prescription, with or without "torch."; None for any other value."""
    return _DTYPES.get(str(value).removeprefix("torch."))


def yours(prescription: Prescription) -> str:
    """Returns a sentence that says why the user has to make this change."""
    if prescription.kind == "skip_batch":
        return (
            f"batch {prescription.value} is to be left out where the loop draws its batches, which no change of the "
            f"model does: `if index == {prescription.value}: continue`, where index counts the batches of all epochs"
        )
    return f"only the code can be changed: {prescription.detail or prescription.value}"


def _what(prescription: Prescription) -> str:
    value = prescription.value
    return prescription.detail or f"{prescription.kind} = {', '.join(value) if _are_names(value) else value}"


def _why_not(prescription: Prescription) -> str:
    return prescription.reason or _NOT_PROVED[prescription.status]
