"""The HTML renderer: one self-contained page that works offline, on a phone and in dark mode.

The most important parts (findings, where, why, change, proof, lines to paste, all small tables) are plain HTML and need
no JavaScript. Scripts add charts and long tables. Nothing is fetched: a Content-Security-Policy forbids every request,
and every script or style but the page's own, by their hashes.

Names come from files that others wrote. In the HTML they pass `sanitise` and Jinja2's autoescape; the scripts get them
as JSON, and insert them as text nodes only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.paths import posix
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.evidence.report_health import HealthRun, HealthSection
from ampdoctor.reports.blocks import Block, Fold, Heading, Text
from ampdoctor.reports.escape import sanitise, sanitise_lines, shortened
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.json_report import report_as_dict
from ampdoctor.reports.outline import outline

# -- runs over time: sentences for the page, and packed numbers for the scripts --
#
# Three runs of 2,000 spans and six maps of 200 tensors are 700,000 numbers. As text they would be most of the page's
# size; as float32 in base64 each takes five characters and keeps seven digits.

_FLOAT32 = 1.2e-38, 3.4e38  # its normal numbers; a column with others is packed as float64
_SHOWN_BY: Mapping[str, tuple[tuple[str, ...], str]] = {
    "forward": (("activation", "parameter"), "log2_headroom"),
    "backward": (("gradient", "activation_gradient"), "norm"),
    "optimizer": (("parameter", "gradient"), "norm"),
}
"""For each phase, the roles whose maps may show a finding, and the map for a finding whose evidence names none."""
_TIME_OF_FOLDER = re.compile(r"^\d{8}-\d{6}-(?=.)")  # how `ampdoctor run` begins the name of a log's folder
_PACKED = frozenset({"axis", "curves", "maps"})


def alerts(section: HealthSection, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings with a step, in the order of their steps; none without a run.

    Each has its finding's number, and the number of the run whose log it names (the first run if it names none).
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
    """Return the run, map and row that show a finding's subject: of a number in the evidence, else the usual one."""
    where = finding.where
    place = where.tensor or where.module
    roles, usual = _SHOWN_BY.get(where.phase, ((), ""))
    wanted = [*(key.removesuffix("_before") for key in finding.evidence), usual]
    found = [
        (wanted.index(one.name), roles.index(one.role), (at, number, one.tensors.index(place)))
        for at, run in enumerate(runs)
        if where.file in (None, run.source)
        for number, one in enumerate(run.maps)
        if one.name in wanted and one.role in roles and place in one.tensors
    ]
    return min(found)[2] if found else None


def _run(run: HealthRun, index: int) -> dict[str, Any]:
    axis = run.axis
    return {
        **{name: to_plain(getattr(run, name)) for name in run.__dataclass_fields__ if name not in _PACKED},
        "letter": chr(ord("A") + index) if index < 26 else str(index + 1),  # for where there is little room
        "axis": {
            **({"first": packed(axis.first, exact=True)} if axis.first != axis.last else {}),
            "last": packed(axis.last, exact=True),
            **{name: packed(known, exact=True) for name in ("samples", "tokens") if (known := getattr(axis, name))},
            **({"skipped": packed(axis.skipped)} if axis.skipped else {}),
        },
        "curves": {
            curve.name: {
                name: packed(values) for name in ("middle", "low", "high", "p99", "nonfinite")
                if (values := getattr(curve, name)) is not None and (name == "middle" or values != curve.middle)
            }
            for curve in run.curves
        },
        "maps": [
            {
                "name": one.name, "role": one.role, "tensors": one.tensors, "of": one.of,
                "steps": packed(one.steps, exact=True), "values": packed(value for row in one.values for value in row),
            }
            for one in run.maps
        ],
    }  # fmt: skip


def packed(values: Iterable[float | None], *, exact: bool = False) -> dict[str, str]:
    """Return numbers as float32 in base64; as float64 if `exact`, or where one does not fit. Missing values are NaN."""
    # A value that is itself NaN becomes infinite: it is known, and it is not finite
    known = [math.nan if v is None else math.inf if math.isnan(v) else float(v) for v in values]
    least, most = _FLOAT32
    wide = exact or any((abs(v) > most and not math.isinf(v)) or 0.0 < abs(v) < least for v in known)
    text = base64.b64encode(array("d" if wide else "f", known).tobytes()).decode("ascii")
    return {"f8" if wide else "f4": text}


_CHARTS = "vendor/echarts.min.js"
_SCRIPTS: Mapping[str, tuple[str, ...]] = {  # by section of the data, in the order of their dependencies
    "profile": ("histogram.js", "ranges.js", "heatmap.js"),
    **{name: (f"{name}.js",) for name in ("scaler", "path")},
    **dict.fromkeys(("proof", "trend"), ("curves.js",)),
    "health": ("health.js", *(f"health_{part}.js" for part in ("lanes", "strip", "maps", "alerts"))),
    **dict.fromkeys(("change", "structure", "tensors"), ("tensors.js",)),
}
_TABLES_ONLY = frozenset({"change", "structure", "tensors"})  # sections that need no plotting library
_BESIDE = {"health": "health", "path": "path", "profile": "ranges"}  # the chart beside the verdict, by section
_COMMENTS = re.compile(r"(?m)^[ \t]*(?:/\*(?:[^*]|\*(?!/))*\*/[ \t]*|//.*)$")
_SITE = ("name", "module", "kind", "half", "amax")  # beside its histogram, what views draw of a place
_SHARES = ("flushed", "subnormal", "overflowed")
_FITTED = ("e4m3fn", "e5m2")  # the scripts work out the other formats from the histogram
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def render_html(report: Report, options: RenderOptions | None = None) -> str:
    """Return the report as one HTML page; the same report and options give the same bytes."""
    shown = report_as_dict(replace(report, health=None))  # only the scripts get its numbers, packed
    data = _data(shown)
    if report.health:
        runs = [_run(run, index) for index, run in enumerate(report.health.runs)]
        data["health"] = {"axis": report.health.axis, "runs": runs, "alerts": alerts(report.health, report.findings)}
    drawn = not _TABLES_ONLY.issuperset(data)
    needed = dict.fromkeys(name for section in _SCRIPTS if section in data for name in _SCRIPTS[section])
    scripts = [_file(_CHARTS)] if drawn else []
    scripts += [_ours(name) for name in ("core.js", *(("table.js", "chart.js") if data else ()), *needed, "start.js")]
    style = _ours("report.css")
    if "profile" in data:
        data["formats"] = json.loads(_file("formats.json"))
    if report.findings:
        first = report.findings[0]
        place = {"module": first.where.module, "tensor": first.where.tensor}
        data["about"] = {"cause": first.cause, "name": first.name, **place}
    said = outline(report)
    about, date = title(report, None if options is None else options.made_at)
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            about=about,
            date=date,
            said=said,
            head=[block for block in said.head[1:] if not isinstance(block, Fold)],
            folded=[block for block in said.head if isinstance(block, Fold)],
            sections=_by_section(said.sections),
            verdict=report.verdict,
            beside=next((view for section, view in _BESIDE.items() if section in data), ""),
            version=shown["tool"]["version"],
            drawn=drawn,
            json=Markup(inert_json(data)),  # noqa: S704 - has no character that HTML gives a meaning to
            scripts=[Markup(script) for script in scripts],  # noqa: S704 - our own files
            style=Markup(style),  # noqa: S704 - our own file
            policy=_policy(scripts, style),
        )
    )


def title(report: Report, made_at: float | None) -> tuple[str, str]:
    """Return command with subject, and the date: of the log's last line, else of the report; "" where it is unknown."""
    target, runs, date = report.target, report.health.runs if report.health else (), ""
    factory = (target.get("factory") or "").partition(":")[0]
    about = target.get("location") or target.get("path") or target.get("profile") or factory
    name = PurePosixPath(posix(str(about))).name
    if report.plan:
        name = f"{report.plan.global_batch:,} samples a step"
    if runs:
        name = _TIME_OF_FOLDER.sub("", runs[0].name) + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")
        made_at = next((ms / 1000 for ms in reversed(runs[0].axis.time_ms or ()) if ms is not None), made_at)
    if made_at is not None:
        with suppress(ValueError, OverflowError, OSError):  # a log may say anything
            date = f"{datetime.fromtimestamp(made_at, UTC):%Y-%m-%d %H:%M UTC}"
    return f"{report.command} of {name}" if name not in ("", report.command) else report.command, date


def _by_section(blocks: Sequence[Block]) -> list[tuple[Heading, list[Block]]]:
    made: list[tuple[Heading, list[Block]]] = []
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2:
            made.append((block, []))
        else:
            made[-1][1].append(block)
    return made


@cache
def environment() -> Environment:
    """Return Jinja2's environment: every value is escaped, and invisible characters are made visible."""
    made = Environment(
        loader=PackageLoader("ampdoctor.reports", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_inert,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"kind": lambda block: type(block).__name__, "lines": lambda text: escape(sanitise_lines(text))}
    return made


def inert_json(value: Any) -> str:
    r"""Return JSON that cannot open or close anything in HTML: ASCII, with `<`, `>` and `&` as `\u003c` and so on."""
    text = json.dumps(_visible(value), sort_keys=True, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the scripts draw, by section."""
    data = {name: shown[name] for name in _SCRIPTS if shown.get(name)}
    if "scaler" in data:
        scaler = data.pop("scaler")
        if scaler.get("trajectory"):
            data["scaler"] = {"trajectory": scaler["trajectory"], "horizon": scaler.get("horizon")}
    if "profile" in data:
        profile = data["profile"]
        sites = [_site(site) for site in profile.get("sites") or () if (site.get("histogram") or {}).get("bins")]
        data["profile"] = {"sites": sites, **{k: profile.get(k) for k in ("loss_scale", "recommended_scale")}}
    return data


def _site(site: Mapping[str, Any]) -> dict[str, Any]:
    """Return a place and its histogram, as `histogram.js` reads it; most bins between first and last are occupied."""
    formats = {name: it for name, it in (site.get("formats") or {}).items() if name in _FITTED}
    fitted = {name: [_rounded(it.get(key)) for key in _SHARES] for name, it in formats.items()}
    histogram = site["histogram"]
    counts = dict(zip(histogram["bins"], histogram["counts"], strict=True))
    spacing = min(float.fromhex(histogram["min_spacing"]), sys.float_info.max)  # that of a single number is infinite
    numbers = [
        min(counts),
        *(min(float.fromhex(histogram[end] or "inf"), sys.float_info.max) for end in ("amin", "amax")),
    ]
    in_a_row = "".join(_digits(counts.get(at, 0)) for at in range(min(counts), max(counts) + 1))
    known = {key: site[key] for key in _SITE if site.get(key)} | (
        {"input": True} if site.get("part") == "input" else {}
    )
    exponent = math.frexp(spacing)[1] - 1
    return {**known, "fitted": fitted, "histogram": [*numbers, histogram["significand_bits"], exponent, in_a_row]}


def _rounded(share: Any) -> Any:
    return round(share, 6) or share if isinstance(share, float) else share  # a small share is not none


def _digits(count: int) -> str:
    """Return a count by five bits a letter, the low ones first; a letter after which more follow has the sixth."""
    digits = ""
    while count > 31:
        digits, count = digits + _DIGITS[32 | (count & 31)], count >> 5
    return digits + _DIGITS[count]


def _policy(scripts: Sequence[str], style: str) -> str:
    allowed = " ".join(_hash(script) for script in scripts)
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _file(name: str) -> str:
    return files("ampdoctor.reports").joinpath(f"html/{name}").read_text(encoding="utf-8")


@cache
def _ours(name: str) -> str:
    """Return a file of ours without comments and indentation, a sixth of its size."""
    return "\n".join(line for kept in _COMMENTS.sub("", _file(name)).splitlines() if (line := kept.strip()))


def _inert(value: Any) -> Any:
    return sanitise(shortened(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return sanitise(value)
    if isinstance(value, Mapping):
        return {sanitise(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, list | tuple) else value


# -- a report in a notebook: HTML without scripts, in the notebook's own colours, light or dark --

_IN_FULL_IN_A_NOTEBOOK = 20  # most findings with a line of their own; one NaN in a step makes hundreds


def render_fragment(report: Report) -> str:
    """Return the report as a fragment of HTML; names are escaped as in the page."""
    said = outline(report)
    shown = [*said.head, said.next, *said.findings[:_IN_FULL_IN_A_NOTEBOOK]]
    left = len(said.findings) - _IN_FULL_IN_A_NOTEBOOK
    more = [Text(f"and {left} more")] if left > 0 else []
    broken = [Text(f"not examined: {error.what} ({error.kind}): {error.message}") for error in report.errors]
    return environment().get_template("fragment.html.j2").render(blocks=[*shown, *more, *broken])
