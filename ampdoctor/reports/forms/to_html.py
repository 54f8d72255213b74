"""The HTML renderer: one self-contained page that opens offline, on a phone and in the dark.

What a reader needs first (findings, where, why, change, proof, lines to paste, every small table) is plain HTML, there
without JavaScript as well. Scripts add charts and the tables that are too long for a page. Nothing is fetched: a
Content-Security-Policy forbids every request and every script or style but those of the page, known by their hash.

Names come from files that others wrote. In the HTML they pass `sanitise` and Jinja2's autoescape; the scripts get them
as JSON, and put them into the page as text nodes only.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.reports.forms.renderer import the_same_everywhere
from ampdoctor.reports.forms.sections.health_on_page import bundles, health_data, summaries
from ampdoctor.reports.forms.to_json import report_as_dict
from ampdoctor.reports.words import plan_words, words
from ampdoctor.reports.words.finding_parts import finding_parts
from ampdoctor.reports.words.gate_words import fixed, fixed_line
from ampdoctor.reports.words.next_step import next_step
from ampdoctor.reports.words.paste import setting_of
from ampdoctor.reports.words.range_words import NOT_MEASURED, ahead, measured_gradients
from ampdoctor.reports.words.sanitise import sanitise, sanitise_lines

_CHARTS = "vendor/echarts.min.js"
_SCRIPTS = ("core.js", "table.js", "chart.js", "histogram.js", "ranges.js", "heatmap.js", "headroom.js", "scaler.js",
            "path.js", "proof.js", "tensors.js", "trend.js", "health.js", "health_lanes.js", "health_strip.js",
            "health_maps.js", "health_scalers.js", "health_alerts.js", "start.js")  # fmt: skip
"""In the order in which they rest on each other; one view a file."""
_DATA = ("profile", "scaler", "path", "proof", "trend", "change", "structure", "tensors")
"""The sections that scripts draw."""
_DRAWN = ("profile", "path", "proof", "trend", "health")
"""Those that need the plotting library."""
_IN_FULL = 3
"""Findings of one code that are all in sight; of more, the first: one NaN makes hundreds of tensors NaN."""
_UNDRAWN = frozenset({"amax_by_step", "quantiles", "weight"})
"""Parts of a measured place that no view shows: a third of the page's size."""


def render_html(report: Report) -> str:
    """Return the report as one HTML page, byte for byte the same for the same report."""
    shown = report_as_dict(replace(report, health=None))  # its numbers go to the scripts alone, packed
    data = _data(shown)
    if report.findings:
        first = report.findings[0]
        place = {"module": first.where.module, "tensor": first.where.tensor}
        data["about"] = {"cause": first.cause, "name": first.name, **place}
    if report.health:
        data["health"] = health_data(report.health, report.findings)
    drawn = any(data.get(name) for name in _DRAWN) or _trajectory(shown) is not None
    scripts = [_file(_CHARTS)] if drawn else []
    scripts += [_file(name) for name in _SCRIPTS]
    style = _file("report.css")
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            report=shown,
            verdict=words.of_verdict(report),
            warned=sum(f.severity == "warning" for f in report.findings) if report.verdict == "healthy" else 0,
            next_step=next_step(report),
            moved=words.moved(report.thresholds) if report.thresholds else "",
            findings=report.findings,
            fixed=fixed(report),
            alike=[
                [(at, finding_parts(it, setting_of(report, it))) for at, it in group]
                for group in _alike(report.findings)
            ],
            summaries=summaries(report),
            bundles=bundles(report),
            drawn=drawn,
            in_full=_IN_FULL,
            planned=report.plan,
            plan_words=plan_words,
            trajectory=_trajectory(shown),
            not_measured="" if measured_gradients(report.profile or {}) else NOT_MEASURED,
            json=Markup(inert_json(data)),  # noqa: S704 - has no character that HTML gives a meaning to
            scripts=[Markup(script) for script in scripts],  # noqa: S704 - our own files
            style=Markup(style),  # noqa: S704 - our own file
            policy=_policy(scripts, style),
        )
    )


@cache
def environment() -> Environment:
    """The templates' settings: every value is escaped, and what acts or hides in a text is made visible."""
    made = Environment(
        loader=PackageLoader("ampdoctor.reports.forms", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_inert,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "percent": words.percent,
        "value": words.value,
        "record": words.record,
        "count": words.count,
        "number": number,
        "size": size,
        "lines": _lines,
        "settings": settings,
        "exact": exact,
        "ahead": ahead,
        "gone": fixed_line,
    }
    return made


def inert_json(value: Any) -> str:
    r"""Return JSON that cannot end, or open, anything in HTML: ASCII, with `<`, `>` and `&` as `\u003c` and so on."""
    text = json.dumps(_visible(value), sort_keys=True, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: Any) -> str:
    """Return a number in four significant digits, `-` where there is none; what is not finite comes as a word."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    whole = float(value).is_integer() and abs(value) < 1e6
    return f"{int(value)}" if whole else f"{value:.4g}"


def size(count: int) -> str:
    """Return bytes as `1.21 MB`."""
    amount, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.3g} {units[0]}"


def settings(known: Mapping[str, Any] | None, without: Sequence[str] = ()) -> str:
    """Return `key=value, key=value`, or `none`."""
    return ", ".join(f"{k}={words.setting(v)}" for k, v in known.items() if k not in without) if known else "none"


def _alike(findings: Sequence[Finding]) -> list[list[tuple[int, Finding]]]:
    """Return the findings with their numbers, those of one code that follow each other together."""
    numbered = enumerate(findings)
    return [list(group) for _, group in groupby(numbered, key=lambda it: (it[1].severity, it[1].code, it[1].cause))]


def _data(shown: Mapping[str, Any]) -> dict[str, Any]:
    data = {name: shown[name] for name in _DATA if shown[name]}
    if "scaler" in data:
        data["scaler"] = {"trajectory": _trajectory(shown), "horizon": data["scaler"].get("horizon")}
    if "profile" in data:
        profile = data["profile"]
        sites = [{k: v for k, v in site.items() if k not in _UNDRAWN} for site in profile.get("sites") or ()]
        data["profile"] = {"sites": sites, **{k: profile.get(k) for k in ("loss_scale", "recommended_scale")}}
        data["formats"] = json.loads(_file("formats.json"))
    return data


def _trajectory(shown: Mapping[str, Any]) -> Any:
    return (shown["scaler"] or {}).get("trajectory")


def _policy(scripts: Sequence[str], style: str) -> str:
    allowed = " ".join(_hash(script) for script in scripts)
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _file(name: str) -> str:
    return files("ampdoctor.reports.forms").joinpath(f"html/{name}").read_text(encoding="utf-8")


def _inert(value: Any) -> Any:
    return sanitise(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _lines(text: str) -> Markup:
    return escape(sanitise_lines(text))


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return sanitise(value)
    if isinstance(value, Mapping):
        return {sanitise(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, list | tuple) else value


RENDERER = the_same_everywhere(render_html)
