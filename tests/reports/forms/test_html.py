from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from ampdoctor.evidence.report import Report
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.reports import html_report
from ampdoctor.reports.formats import RenderOptions
from ampdoctor.reports.html_report import inert_json, render_fragment, render_html
from ampdoctor.reports.json_report import render_json
from tests.browser.health_pages import health_report, health_run
from tests.browser.pages import EVERY_VIEW, HOSTILE, PROFILED
from tests.samples import EVERY, OVERFLOW, SICK

HTML = files("ampdoctor.reports").joinpath("html")
REPORTS = {**EVERY, **EVERY_VIEW}
VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """The elements of a page with their attributes and text; refuses tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open, self.declaration = [], [], None
        self.feed(text)
        self.close()
        assert self._open == [], "elements are left open"

    def handle_decl(self, decl):
        self.declaration = decl

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attributes": dict(attrs), "text": ""}
        assert len(element["attributes"]) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1]["tag"] == tag, f"</{tag}> closes <{self._open[-1]['tag']}>"
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [
            e
            for e in self.elements
            if e["tag"] == tag and all(e["attributes"].get(k) == v for k, v in attributes.items())
        ]

    def one(self, tag, **attributes):
        (found,) = self.all(tag, **attributes)
        return found


@pytest.fixture(scope="module")
def pages():
    return {name: render_html(report) for name, report in REPORTS.items()}


@pytest.fixture(scope="module")
def parsed(pages):
    return {name: Page(text) for name, text in pages.items()}


@pytest.mark.parametrize("name", EVERY_VIEW)
def test_what_is_drawn_here_follows_the_schema(name, check_report):
    check_report(render_json(EVERY_VIEW[name]))


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_is_a_well_formed_page_with_one_title_and_one_heading(name, parsed):
    page = parsed[name]
    assert page.declaration == "DOCTYPE html"
    assert page.one("html")["attributes"]["lang"] == "en"
    assert page.one("title")["text"] == page.one("h1")["text"]
    assert page.one("title")["text"].startswith(REPORTS[name].command)
    assert len(page.all("main")) == 1


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_forbids_every_fetch_and_every_script_but_its_own(name, parsed):
    page = parsed[name]
    policy = page.one("meta", **{"http-equiv": "Content-Security-Policy"})["attributes"]["content"]
    directives = {d.split()[0]: d.split()[1:] for d in policy.split(";")}
    assert directives.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert directives["default-src"] == directives["base-uri"] == directives["form-action"] == ["'none'"]
    scripts = [e["text"] for e in page.all("script") if "type" not in e["attributes"]]
    assert directives["script-src"] == [sha256(text) for text in scripts]
    assert directives["style-src"] == [sha256(e["text"]) for e in page.all("style")]


def sha256(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_in_the_page_points_outside_it(name, parsed):
    page = parsed[name]
    assert not page.all("link")
    assert not page.all("img")
    assert not page.all("iframe")
    for element in page.elements:
        attributes = element["attributes"]
        assert attributes.keys().isdisjoint({"src", "srcset", "action", "data", "style", "background"})
        assert not any(key.startswith("on") for key in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in page.one("style")["text"]
    assert "@import" not in page.one("style")["text"]


@pytest.mark.parametrize("name", REPORTS)
def test_links_and_labels_point_at_something(name, parsed):
    page = parsed[name]
    ids = [e["attributes"]["id"] for e in page.elements if "id" in e["attributes"]]
    assert len(ids) == len(set(ids))
    assert {e["attributes"]["href"][1:] for e in page.all("a")} <= set(ids)


@pytest.mark.parametrize("name", EVERY_VIEW)
def test_a_name_made_of_markup_comes_out_as_text(name, pages, parsed):
    page = parsed[name]
    assert not page.all("b")
    assert not page.all("img")
    assert all(character not in pages[name] for character in ("\u202e", "\u2028", "\x1b"))
    data = json.loads(page.one("script", id="report-data")["text"])
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b").replace("\u2028", "\\u2028")
    assert shown in json.dumps(data, ensure_ascii=False).replace("\\\\", "\\").replace('\\"', '"')


@pytest.mark.parametrize("text", ["</script>", "\u2028", "\ud800", "&lt;"])
def test_json_in_the_page_has_no_character_that_html_gives_a_meaning_to(text):
    written = inert_json({text: [text]})
    assert written.isascii()
    assert not set("<>&") & set(written)
    json.loads(written)


def test_many_findings_of_one_code_are_folded_behind_the_first():
    page = Page(render_html(dataclasses.replace(SICK, findings=(OVERFLOW,) * 5 + SICK.findings[1:])))
    assert len(page.all("article")) == 6
    (rest,) = (e["text"] for e in page.all("summary") if "4 more" in e["text"])
    assert rest.startswith("of the same cause, 4 more: encoder.block.3.ff.wo")
    assert "5 errors" in page.one("header")["text"]


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_without_the_chart_library_and_the_curves_of_runs_is_below_150_kb(name, pages, parsed):
    library = HTML.joinpath("vendor/echarts.min.js").read_text()
    drawn = library in pages[name]
    data = json.loads(parsed[name].one("script", id="report-data")["text"])
    assert len(pages[name].replace(library, "")) - len(json.dumps(data.get("health", ""))) < 150_000
    assert drawn or name not in ("sick", "profiled", "watched")
    assert not drawn or name not in ("healthy", "listed", "scanned")


SECONDS = 1_795_832_003.0


@pytest.mark.parametrize(
    ("report", "made_at", "wanted"),
    [
        (EVERY["sick"], SECONDS, "bisect-nan of t5.py, 2026-11-28 02:13 UTC"),
        (EVERY["sick"], None, "bisect-nan of t5.py"),
        (EVERY_VIEW["scanned"], SECONDS, "scan of model.safetensors, 2026-11-28 02:13 UTC"),
        (Report(command="plan", target={}, verdict="healthy"), SECONDS, "plan, 2026-11-28 02:13 UTC"),
        (health_report(health_run("20261128-021003-train", spans=2)), SECONDS, "health of train, 2026-09-21 14:13 UTC"),
        (health_report(*[health_run(spans=2)] * 3), None, "health of gpt2-fp16 and 2 more, 2026-09-21 14:13 UTC"),
        (EVERY["healthy"], math.inf, "scan of model.safetensors"),
    ],
)
def test_the_title_is_command_subject_and_the_date_of_the_log_else_of_the_report(report, made_at, wanted):
    page = Page(render_html(report, RenderOptions(width=100, made_at=made_at)))
    assert page.one("title")["text"] == page.one("h1")["text"] == wanted


def ours(suffix):
    return [path for path in HTML.iterdir() if path.name.endswith(suffix)]


@pytest.mark.parametrize("path", ours(".js"), ids=lambda path: path.name)
def test_our_scripts_make_text_and_never_html(path):
    text = path.read_text()
    for trap in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("):
        assert trap not in text
    assert "</script" not in text
    assert "<!--" not in text
    assert len(text.splitlines()) <= 400


def test_every_script_is_in_a_page_and_none_where_it_has_nothing_to_draw(parsed):
    scripts = {name: {e["text"] for e in page.all("script")} for name, page in parsed.items()}
    assert {html_report._ours(path.name) for path in ours(".js")} <= set().union(*scripts.values())
    assert html_report._ours("health.js") not in scripts["profiled"]
    assert html_report._ours("chart.js") not in scripts["healthy"]


def test_the_formats_of_the_scripts_are_those_of_the_package():
    table = json.loads(HTML.joinpath("formats.json").read_text())
    assert table == {name: {key: getattr(FORMATS[name], key) for key in row} for name, row in table.items()}
    assert table.keys() == {"fp16", "bf16", "e4m3fn", "e5m2"}


def test_what_no_view_shows_stays_out_of_the_page(parsed):
    data = json.loads(parsed["profiled"].one("script", id="report-data")["text"])
    assert data["profile"]["sites"][0].keys().isdisjoint({"amax_by_step", "numel", "formats"})
    assert data["scaler"].keys() == {"trajectory", "horizon"}
    assert len(data["profile"]["sites"]) == len(PROFILED.profile["sites"])


def test_a_notebook_gets_a_small_inert_fragment():
    fragment = SICK._repr_html_()
    assert fragment == render_fragment(SICK)
    page = Page(fragment)
    assert len(fragment) < 20_000
    assert not page.all("script")
    for part in ("AMP201", "verified by replay", "run encoder.block.3.ff.wo in fp32", "verdict: sick"):
        assert part in page.elements[0]["text"]
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb", page.one("style")["text"]), (
        "a colour of its own is unreadable somewhere"
    )
