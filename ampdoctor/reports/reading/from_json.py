"""Read a report back from what `to_json` and `to_jsonl` write: rendered again, it says the same.

Numbers come back as they were written: floats with 6 significant digits. What follows from the rest (`url`,
`fingerprint`, `verified`, the `code` to paste) is made anew and not read. A non-finite number in the free form of
`evidence`, `target` or `headroom` stays its word, for there a name may be that word. The keys of `run`, `target` and
scaler settings have the order again in which people read them; those of `evidence` are sorted for people, too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ampdoctor.errors import ReportError
from ampdoctor.evidence.json_records import DuplicateKeyError, from_plain, unique_keys
from ampdoctor.evidence.report import NOT_IN_HALF, SCHEMA_VERSION, STEPS_AFTER, Report, SkippedKind
from ampdoctor.reports.forms.to_jsonl import HEADER, LISTS, SUMMARY
from ampdoctor.reports.reading.schema_reader import read_checked
from ampdoctor.reports.words.key_order import RUN, SCALER, TARGET, in_order

_CAME_LATER = {"health": None, "plan": None}
"""Sections that the first reports of this schema version do not know, and what they say without them."""
_MAX_DEPTH = 100
"""Levels of values in values; a report of ours has some ten, and what reads or writes one calls itself for each."""


def report_from_text(text: str) -> Report:
    """Return the report that a JSON or JSONL text holds; which of the two, its first line says.

    Raises:
        ReportError: It is neither, has been cut, is of another schema version, or does not follow the schema.
    """
    first, _, rest = text.lstrip().partition("\n")
    begun = _parsed(first)
    if isinstance(begun, dict) and begun.get("type") == HEADER:
        return report_from_dict(_joined(_loaded(first, "line 1"), rest))
    return report_from_dict(_loaded(text, "the text"))


def report_from_dict(data: Any) -> Report:
    """Return the report that the values of a JSON report hold.

    Raises:
        ReportError: They are none, are of another schema version, or do not follow the schema.
    """
    if _deeper(data, _MAX_DEPTH):
        raise ReportError(f"a report that is nested more than {_MAX_DEPTH} deep")
    if _beyond_floats(data):
        raise ReportError("no report of ampdoctor: it has an integer beyond the largest float")
    if not isinstance(data, dict) or "schema_version" not in data:
        raise ReportError("no report of ampdoctor: it has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        raise ReportError(
            f"a report of schema version {data['schema_version']}; this version of ampdoctor reads {SCHEMA_VERSION}"
        )
    report = _report(read_checked({**_CAME_LATER, **data}))
    _refuse_contradictions(report)
    return report


def _report(read: dict[str, Any]) -> Report:
    return from_plain(
        Report,
        {
            **read,
            "target": in_order(read["target"], TARGET),
            "run": in_order(read["run"], RUN),
            "scaler": _scaler(read["scaler"]),
            "findings": [_finding(finding) for finding in read["findings"]],
            "skipped": [{**one, "kind": _kind(one)} for one in read["skipped"]],
            "suppressed": [{**one, "finding": _finding(one["finding"])} for one in read["suppressed"]],
        },
    )


def _finding(read: dict[str, Any]) -> dict[str, Any]:
    """The finding, whose further addresses are in the same part of a step."""
    return {**read, "also": [{"phase": read["where"]["phase"], **place} for place in read["also"]]}


def _kind(skipped: dict[str, Any]) -> SkippedKind:
    """What was left out, by its words: a report has nothing else."""
    if skipped["what"].startswith(STEPS_AFTER):
        return "not_replayed"
    if skipped["what"] == NOT_IN_HALF:
        return "not_in_half"
    return "lfs_pointer" if "Git LFS pointer" in skipped["reason"] else "left_out"


def _scaler(read: dict[str, Any] | None) -> dict[str, Any] | None:
    """The section with its settings in the order in which people know them."""
    if read is None:
        return None
    return read | {key: in_order(read[key], SCALER) for key in ("current", "recommended", "bounds") if read[key]}


def _refuse_contradictions(report: Report) -> None:
    """Refuse what no run can have come to: an exit code will be decided by it.

    A finding that was set aside is as true as any other. A watched run that has died is sick and may have no finding,
    but then it is incomplete.
    """
    found = (*report.findings, *(one.finding for one in report.suppressed))
    errors = any(finding.severity == "error" for finding in found)
    said = None
    if report.complete and report.errors:
        said = "it is complete, and something could not be examined"
    elif errors and report.verdict not in ("sick", "not_judged"):
        said = f"its verdict is {report.verdict}, and an error was found"
    elif report.verdict == "sick" and report.complete and not errors:
        said = "its verdict is sick, and no error was found"
    elif report.complete and not found and any(check.result == "found" for check in report.checks):
        said = "a check has found something, and no finding says what"
    if said is not None:
        raise ReportError(f"a report that contradicts itself: {said}")


def _joined(header: dict[str, Any], rest: str) -> dict[str, Any]:
    """The JSON report of a stream of lines."""
    *texts, last = rest.rstrip().split("\n")
    summary = _parsed(last)
    if not isinstance(summary, dict) or summary.get("type") != SUMMARY:
        raise ReportError("the report has been cut: its last line is no summary")
    summary = _loaded(last, "the last line")
    for said in ("verdict", "complete"):
        if summary.get(said) != header.get(said):
            raise ReportError(
                f"a report that contradicts itself: the {said} of its summary is not that of its first line"
            )
    lines = [_loaded(text, f"line {number}") for number, text in enumerate(texts, 2)]
    lists: dict[str, list[Any]] = {key: [] for key in LISTS.values()}
    for number, line in enumerate(lines, 2):
        key = LISTS.get(str(line.pop("type", ""))) if isinstance(line, dict) else None
        if key is None:
            raise ReportError(f"line {number} is of no type that a report has")
        lists[key].append(line)
    for key, entries in lists.items():
        announced = summary.get(key) or 0
        if announced != len(entries):
            raise ReportError(f"the summary counts {announced} {key}, and {len(entries)} are there")
    whole = {key: value for key, value in header.items() if key != "type"}
    return whole | {key: None if summary.get(key) is None else entries for key, entries in lists.items()}


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value holds others more than so many levels deep."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(
        _deeper(one, levels - 1) for one in (value.values() if isinstance(value, dict) else value)
    )


def _beyond_floats(value: Any) -> bool:
    """Whether a value is or holds an integer that is none of ours: what reads a number may make a float of it."""
    if isinstance(value, dict | list):
        return any(map(_beyond_floats, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _parsed(text: str) -> Any:
    """What a line says; None where it is not the whole of a JSON value."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _loaded(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ReportError(f"{what} is nested too deeply") from None
    except DuplicateKeyError as error:
        raise ReportError(f"{what} has the key {error.key!r} twice in one object") from None
    except ValueError as error:
        raise ReportError(f"{what} is no JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
