"""What the HTML page says of runs over time: sentences for everybody, and packed numbers for the scripts that draw.

Three runs of 2,000 spans and six maps of 200 tensors are 700,000 numbers. As text they would be most of the page's
weight; as float32 in base64 each takes five letters, and seven digits of it stay.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.evidence.report_health import HealthRun, HealthSection, LookMark
from ampdoctor.reports.words import words

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Names of the runs where there is room for no more than one letter."""
_LARGEST, _LEAST = 3.4e38, 1.2e-38
"""Of float32's normal numbers; beyond them a column keeps all its bits."""
_SHOWN_BY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "forward": (("activation", "parameter"), "headroom_binades"),
    "backward": (("gradient", "activation_gradient"), "norm"),
    "optimizer": (("parameter", "gradient"), "norm"),
}
"""Of each phase the roles whose maps may show a finding, and the map for one whose evidence names none."""
_PACKED = frozenset({"axis", "curves", "maps"})


def health_data(section: HealthSection, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what the scripts draw."""
    return {
        "axis": section.axis,
        "runs": [_run(run, index) for index, run in enumerate(section.runs)],
        "alerts": alerts(section, findings),
    }


def alerts(section: HealthSection, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings that have a step, in the order of their steps.

    Each with the number of its finding, and the number of its run: that whose log it names, the first where it names
    none. Without a run there are none.
    """
    runs = {run.source: index for index, run in reversed(list(enumerate(section.runs)))}
    found = [
        {
            "finding": index,
            "step": it.where.step,
            "run": runs.get(it.where.file or "", 0),
            "severity": it.severity,
            "code": it.code,
            "name": it.name,
            "message": it.message,
            "place": it.where.tensor or it.where.module,
            "map": _map_of(it, section.runs),
        }
        for index, it in enumerate(findings)
        if it.where.step is not None and section.runs
    ]
    return sorted(found, key=lambda it: it["step"])


def _map_of(finding: Finding, runs: Sequence[HealthRun]) -> tuple[int, int, int] | None:
    """Return the run, its map and the row of it that show what a finding is about; None where none does.

    A number that its evidence has is the map's own, else the one that its pass usually breaks.
    """
    where = finding.where
    place = where.tensor or where.module
    measured = [key.removesuffix("_before") for key in finding.evidence]
    roles, usual = _SHOWN_BY.get(where.phase, ((), ""))
    best: tuple[tuple[int, int], tuple[int, int, int]] | None = None
    for at, run in enumerate(runs):
        if where.file not in (None, run.source):
            continue
        for number, one in enumerate(run.maps):
            known = one.name in measured
            if one.role not in roles or place not in one.tensors or not (known or one.name == usual):
                continue
            rank = (measured.index(one.name) if known else len(measured), roles.index(one.role))
            if best is None or rank < best[0]:
                best = rank, (at, number, one.tensors.index(place))
    return None if best is None else best[1]


def bundles(report: Report) -> dict[int, LookMark]:
    """Return the look at each finding's own step that has left a bundle, by the finding's number."""
    section, found = report.health, {}
    for alert in alerts(section, report.findings) if section else ():
        looks = section.runs[alert["run"]].looks if section else ()
        of_it = next((look for look in looks if look.bundle and look.step == alert["step"]), None)
        if of_it is not None:
            found[alert["finding"]] = of_it
    return found


def summaries(report: Report) -> list[dict[str, str]]:
    """Return a line for each run: its letter, its name and the rest of the sentence."""
    if report.health is None:
        return []
    by_run: dict[int, list[str]] = {}
    for alert in alerts(report.health, report.findings):
        by_run.setdefault(alert["run"], []).append(alert["severity"])
    return [
        {"letter": letter(index), "name": run.name, "says": summary(run, by_run.get(index, ()))}
        for index, run in enumerate(report.health.runs)
    ]


def summary(run: HealthRun, severities: Sequence[str]) -> str:
    """Return what a run was, how it ended and what was noticed, in one line."""
    ends = {"running": "still running", "ended": "ended", "cut_off": "cut off without a last line", "unknown": ""}
    end = ends[run.ending] + (f" with exit code {run.exit_code}" if run.exit_code else "")
    steps = words.count(run.steps, "step") + (f", {run.first_step:,} to {run.last_step:,}" if run.steps > 1 else "")
    share = "" if run.skip_share is None else f" ({words.percent(run.skip_share)})"
    counted = [(severity, list(severities).count(severity)) for severity in ("error", "warning", "note")]
    noticed = ", ".join(words.count(many, severity) for severity, many in counted if many) or "nothing noticed"
    good = [mark.step for mark in run.checkpoints if mark.health == "good"]
    parts = [
        ", ".join(part for part in (run.optimizer, run.precision or "", f"log of {run.format}", end) if part),
        steps,
        f"{run.skipped:,} skipped{share}" if run.skipped or run.skip_share is not None else "",
        noticed,
        f"last good checkpoint after step {max(good):,}" if good else "",
        f"{words.count(run.lost, 'line')} not in the log" if run.lost else "",
    ]
    return "; ".join(part for part in parts if part)


def letter(index: int) -> str:
    """Return the letter of a run; beyond the alphabet its number."""
    return LETTERS[index] if index < len(LETTERS) else str(index + 1)


def _run(run: HealthRun, index: int) -> dict[str, Any]:
    axis = run.axis
    return {
        **{name: to_plain(getattr(run, name)) for name in run.__dataclass_fields__ if name not in _PACKED},
        "letter": letter(index),
        "axis": {
            "first": exactly(axis.first),
            "last": exactly(axis.last),
            **{name: exactly(known) for name in ("samples", "tokens") if (known := getattr(axis, name))},
            **({"skipped": packed(axis.skipped)} if axis.skipped else {}),
        },
        "curves": {
            curve.name: {
                name: packed(values) for name in ("low", "middle", "high", "p99", "nonfinite")
                if (values := getattr(curve, name)) is not None
            }
            for curve in run.curves
        },
        "maps": [
            {
                "name": one.name, "role": one.role, "steps": exactly(one.steps), "tensors": one.tensors, "of": one.of,
                "values": packed(value for row in one.values for value in row),
            }
            for one in run.maps
        ],
    }  # fmt: skip


def packed(values: Iterable[float | None]) -> dict[str, str]:
    """Return numbers as float32, in base64; as float64 where one has no such form. What is missing is NaN.

    A number that is itself NaN is infinite here: it is known, and it is no number.
    """
    known = [math.nan if v is None else math.inf if math.isnan(v) else float(v) for v in values]
    beyond = any((abs(v) > _LARGEST and not math.isinf(v)) or 0.0 < abs(v) < _LEAST for v in known)
    return _base64("d" if beyond else "f", known)


def exactly(values: Iterable[float | None]) -> dict[str, str]:
    """The same, always as float64: counts up to 2^53 are exact."""
    return _base64("d", [math.nan if v is None else float(v) for v in values])


def _base64(kind: str, values: list[float]) -> dict[str, str]:
    made = array(kind, values)
    if sys.byteorder == "big":
        made.byteswap()
    return {{"f": "f4", "d": "f8"}[kind]: base64.b64encode(made.tobytes()).decode("ascii")}
