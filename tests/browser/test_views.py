"""The HTML report in a browser: every view opened, read, clicked through, on a phone, in the dark, by keyboard."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ampdoctor.numerics.histogram import Histogram
from tests.browser import pages
from tests.browser.conftest import AXE, DESK, PHONE, harmless, wait_until
from tests.browser.pages import EVERY_VIEW, FITTING, HOSTILE, PROFILED, RUN_SCALE, SITES
from tests.samples import UNDERFLOW

pytestmark = pytest.mark.slow
CHARTS = {"profiled": 4, "bisected": 3, "scanned": 0, "followed": 1, "listed": 0, "watched": 13, "beside": 13}
SHOWN = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b").replace("\u2028", "\\u2028")


TOUCHING = """() => {
    const badges = [...document.querySelectorAll(".badge")].filter((e) => e.checkVisibility());
    const boxes = badges.map((e) => e.getBoundingClientRect());
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => a.left < b.right + 2 && b.left < a.right + 2 &&
        a.top < b.bottom && b.top < a.bottom)).length;
}"""
"""How many pairs of badges lie on each other, or beside each other without room."""


def table_texts(page, scope):
    return [row.locator("td, th").all_inner_texts() for row in scope.locator("tbody tr").all()]


def share(text):
    """A share as the page writes it, with the half of its last digit that rounding may take."""
    return pytest.approx(0.005 if text == "<0.01%" else float(text.removesuffix("%")), abs=0.0051)


def unfold(page):
    """Turn the charts into tables: these are made when they are asked for."""
    page.get_by_label("Show as tables").check()


def half(kind):
    return [site for site in SITES if site["kind"] == kind and site["half"]]


def width_and_colours(name, viewport, scheme):
    """Whether a view fits is a matter of its width, and contrast one of the colours."""
    width = viewport["width"]
    return {(name, width), (name, scheme), (width, scheme)}


@pytest.mark.each_value_once(of=width_and_colours)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("name", EVERY_VIEW)
def test_every_view_opens_without_a_complaint_fits_its_width_and_breaks_no_rule_of_accessibility(
    name, viewport, scheme, settled
):
    page = settled(name, viewport=viewport, scheme=scheme, unfold=True)
    assert page.locator(".chart").count() == CHARTS[name]
    assert page.locator("html[data-ready]").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.evaluate(TOUCHING) == 0
    assert page.evaluate("window.broken") is None
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        "(tags) => axe.run(document, {preload: false, runOnly: tags})",
        ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    )
    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []
    assert "color-contrast" in {rule["id"] for rule in found["passes"]}


def test_a_request_and_a_foreign_script_are_refused_by_the_page_itself(chromium, report_files):
    page = chromium.new_page()
    asked, refusals = [], []
    page.on("request", lambda request: asked.append(request.url) if not harmless(request.url) else None)
    page.on("requestfailed", lambda request: refusals.append((request.url, request.failure)))
    page.goto(report_files("listed"))
    page.evaluate(
        """async () => {
            window.refused = [];
            document.addEventListener("securitypolicyviolation", (e) => window.refused.push(e.effectiveDirective));
            document.body.append(Object.assign(new Image(), { src: "https://example.com/a.png" }));
            const script = document.createElement("script");
            script.textContent = "window.broken = 1";
            document.body.append(script);
            await fetch("https://example.com/").catch(() => {});
        }"""
    )
    wait_until(page, lambda: {"img-src", "script-src-elem", "connect-src"} <= set(page.evaluate("window.refused")))
    assert page.evaluate("window.broken") is None
    wait_until(page, lambda: sorted(refusals) == sorted((url, "csp") for url in asked))
    page.close()


def merged(kind, name, scale):
    histogram = Histogram.empty()
    for site in half(kind):
        histogram += Histogram.from_dict(site["histogram"])
    return [getattr(histogram, part)(name, scale) for part in ("flushed", "subnormal", "overflowed")]


def test_the_slider_says_what_each_loss_scale_does(settled):
    page = settled("profiled")
    slider, shares = page.get_by_label("Loss scale", exact=True), page.locator(".shares")
    page.get_by_label("Tensors", exact=True).select_option("weight_grad")
    for exponent, name in ((0, "fp16"), (16, "fp16"), (24, "fp16"), (32, "e5m2"), (-10, "bf16")):
        page.get_by_label("Format", exact=True).select_option(name)
        slider.fill(str(exponent))
        assert page.locator("output").inner_text().startswith(f"2^{exponent} = ")
        assert slider.get_attribute("aria-valuetext").startswith(f"2^{exponent} = ")
        said = re.search(r"in (\w+): flushed ([^,]+), subnormal ([^,]+), overflowing ([^;]+);", shares.inner_text())
        assert said[1] == name
        for text, figure in zip(said.groups()[1:], merged("weight_grad", name, 2.0**exponent), strict=True):
            assert 100 * figure == share(text)
    page.get_by_role("button", name="run 2^16").click()
    assert slider.input_value() == "16"
    page.get_by_role("button", name="fits 2^12").click()
    assert slider.input_value() == "12"
    page.get_by_label("Tensors", exact=True).select_option("weight")
    assert slider.is_disabled()
    assert "does not act on these" in page.locator("output").inner_text()


def test_the_histogram_of_a_layer_and_its_table_agree_with_the_counts(settled):
    page = settled("profiled")
    page.get_by_label("Tensors", exact=True).select_option("weight_grad")
    page.get_by_label("Format", exact=True).select_option("fp16")
    page.get_by_label("Layer", exact=True).select_option(label="blocks.3.mlp.weight")
    page.get_by_label("Loss scale", exact=True).fill("0")
    view = page.locator("#histogram-view")
    site = next(s for s in SITES if s["name"] == "blocks.3.mlp.weight")
    histogram = Histogram.from_dict(site["histogram"])
    said = re.search(r": flushed ([^,]+), subnormal ([^,]+), overflowing ([^,]+),", view.inner_text())
    assert 100 * histogram.flushed("fp16") == share(said[1])
    assert 100 * histogram.subnormal("fp16") == share(said[2])
    unfold(page)
    rows = table_texts(page, view)
    by_exponent = histogram.counts.reshape(-1, 8).sum(axis=1)
    expected = [(f"2^{e - 127}", int(many)) for e, many in enumerate(by_exponent) if many]
    assert [(row[0], int(row[2].replace(",", ""))) for row in rows] == expected
    flushed = sum(int(row[2].replace(",", "")) for row in rows if row[3] == "flushed")
    assert flushed / int(by_exponent.sum()) == pytest.approx(histogram.flushed("fp16"), abs=1e-12)


def test_the_heat_map_has_every_layer_by_format_and_scale(settled):
    page = settled("profiled")
    page.get_by_label("Tensors", exact=True).select_option("weight_grad")
    view = page.locator("#heatmap-view")
    unfold(page)
    page.evaluate("document.querySelectorAll('#heatmap-view .more').forEach((b) => { while (!b.hidden) b.click(); })")
    shares = {(row[0], row[1]): row[2] for row in table_texts(page, view)}
    assert {name for name, _ in shares} == {site["name"] for site in half("weight_grad")}
    for site in half("weight_grad")[:3]:
        histogram = Histogram.from_dict(site["histogram"])
        name = site["name"]
        assert 100 * histogram.flushed("fp16", 1.0) == share(shares[name, "fp16 2^0"])
        assert 100 * histogram.flushed("fp16", RUN_SCALE) == share(shares[name, "fp16 2^16 run"])
        assert 100 * histogram.flushed("fp16", FITTING) == share(shares[name, "fp16 2^12 fits"])
        assert shares[name, "bf16"] == "0.00%"
        assert 100 * site["formats"]["e5m2"]["flushed"] == share(shares[name, "e5m2 *"])
    page.get_by_label("Share", exact=True).select_option("overflowed")
    page.get_by_label("Order", exact=True).select_option("worst")
    worst = max(half("weight_grad"), key=lambda s: Histogram.from_dict(s["histogram"]).overflowed("fp16", 2.0**24))
    assert table_texts(page, view)[0][0] == worst["name"]


def test_the_scalers_trajectory_has_its_table(settled):
    page = settled("profiled")
    view = page.locator("#scaler-view")
    assert "edge: above it a recorded step overflows" in view.inner_text()
    unfold(page)
    rows = table_texts(page, view)
    assert ["0", "in use", "step skipped", "65536"] in rows
    assert ["200", "recommended", "scale from here on", "16384"] in rows
    assert ["1", "recorded", "largest scale without overflow", "32768"] in rows
    assert "in use 3 of 1000, recommended 0 of 1000" in view.inner_text()
    assert (
        "No recorded step overflows at scales up to 2^14 (dotted). That is the edge; the scale that"
        in view.inner_text()
    )


@pytest.mark.parametrize(("name", "says"), [("watched", "Loss scale"), ("bisected", "origin"), ("profiled", "Share")])
def test_what_matters_stands_beside_the_verdict(name, says, visit):
    page = visit(name, viewport={"width": 1280, "height": 900})
    beside = page.locator("header > [data-chart]")
    assert says in beside.inner_text()
    box, verdict = beside.bounding_box(), page.locator("h1").bounding_box()
    assert box["x"] > verdict["x"] + 400
    assert box["y"] < verdict["y"] + verdict["height"]
    assert box["y"] + box["height"] < 900


@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 900}, {"width": 390, "height": 844}])
def test_the_fix_and_its_button_are_on_the_first_screen(viewport, visit):
    page = visit("bisected", viewport=viewport)
    fix = page.locator("header article .copy").first.bounding_box()
    assert fix["y"] + fix["height"] < viewport["height"]
    code = page.locator("header article pre").first
    assert code.evaluate("(e) => e.scrollWidth <= e.clientWidth"), "lines to copy are folded, not cut"


def test_the_path_and_the_proof_have_their_tables(settled):
    page = settled("bisected")
    path, proof = page.locator("#path-view"), page.locator("#proof-view")
    unfold(page)
    rows = table_texts(page, path.locator(".as-table").first)
    assert [row[1] for row in rows] == ["before", "before", "origin", "carrier", "carrier", "affected"]
    assert rows[2] == ["12", "origin", "encoder.block.3.ff.wo", "aten.linear", "12.5", "65504", "0", "3"]
    assert rows[4][2] == SHOWN
    for measure, finite in (("loss", ("2.41", "2.409")), ("gradient_norm", ("2.5", "2.5"))):
        page.get_by_label("Show", exact=True).select_option(measure)
        runs = zip(("with the change", "without the change", "fp32"), (finite[0], "NaN", finite[1]), strict=True)
        assert table_texts(page, proof)[:3] == [["3", *row] for row in runs]


def test_ten_thousand_tensors_are_searched_sorted_and_drawn_bit_by_bit(visit):
    page = visit("ten_thousand")
    assert page.locator("#tensors-view").is_hidden(), "nothing was found in them"
    page.locator("#tensors summary").click()
    view = page.locator("#tensors-view")
    status, rows = view.get_by_role("status"), view.locator("tbody tr")
    assert status.inner_text() == "10,000 tensors"
    assert rows.count() == 100
    view.locator(".scroll").evaluate("(s) => { s.scrollTop = s.scrollHeight; }")
    wait_until(page, lambda: rows.count() == 200)
    view.get_by_role("button", name="Show 100 more tensors").click()
    assert rows.count() == 300
    heading = view.get_by_role("columnheader", name="largest")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows.first.locator("td").nth(5).inner_text() == "524288"
    view.get_by_label("Search", exact=True).fill("layers.99. part3")
    assert status.inner_text() == "1 of 10,000 tensors"
    assert rows.first.locator("td").first.inner_text() == "model.layers.99.part3.weight"
    view.get_by_label("Search", exact=True).fill("onerror")
    assert rows.first.locator("td").first.inner_text() == SHOWN
    view.get_by_label("Search", exact=True).fill("")
    view.get_by_label("Role", exact=True).select_option("moment")
    assert status.inner_text() == "3,333 of 10,000 tensors"


def test_the_trend_shows_each_measure(settled):
    page = settled("followed")
    view = page.locator("#trend-view")
    unfold(page)
    show = view.get_by_label("Show", exact=True)
    assert show.input_value() == "fp16_flushed", "what the first finding is about"
    for measure, row in (
        ("amax", ["2000", "step-2000", "weights", "900"]),
        ("fp16_flushed", ["3000", "step-3000", "weights", "3.00%"]),
        ("scale", ["1000", "step-1000", "loss scale", "2^16"]),
        ("loss", ["3000", "step-3000", "loss", "NaN"]),
    ):
        show.select_option(measure)
        assert row in table_texts(page, view)
    assert SHOWN in page.locator("#change-view").inner_text()


@pytest.mark.parametrize(("name", "chart"), [("bisected", "#path-view"), ("profiled", "#heatmap-view")])
def test_hovering_shows_hostile_names_as_text(name, chart, settled):
    page = settled(name)
    page.locator(f"{chart} .chart").first.scroll_into_view_if_needed()
    seen = page.evaluate(
        """async (selector) => {
            const chart = document.querySelector(selector), canvas = chart.querySelector("canvas"), seen = new Set();
            const { width, height } = canvas.getBoundingClientRect();
            for (let y = 2; y < height; y += 4) for (let x = 4; x < width; x += 6) {
                const { left, top } = canvas.getBoundingClientRect();
                const at = { bubbles: true, clientX: left + x, clientY: top + y };
                canvas.dispatchEvent(new MouseEvent("mousemove", at));
                for (const tip of chart.querySelectorAll(":scope > div:not(:has(canvas))")) seen.add(tip.textContent);
            }
            return [...seen];
        }""",
        f"{chart} .chart",
    )
    assert any(SHOWN in text for text in seen), sorted(seen)[:5]
    assert page.locator(".chart img, .chart b, .chart script").count() == 0
    assert page.evaluate("window.broken") is None


@pytest.mark.parametrize("name", ["profiled", "scanned", "watched"])
def test_everything_can_be_reached_and_seen_by_keyboard_alone(name, settled):
    page = settled(name)
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("a, button, select, input, summary, [tabindex='0']")]
            .filter((e) => !e.disabled && e.checkVisibility()).map((e, i) => { e.dataset.stop = i; return i; })"""
    )
    reached, seen = [], []
    for _ in range(len(wanted) + 2):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            """() => { const e = document.activeElement, style = getComputedStyle(e);
                const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
                return [e.dataset?.stop ?? null, outlined]; }"""
        )
        if stop[0] is None:
            break
        reached.append(int(stop[0]))
        seen.append(stop[1])
    assert reached[: len(wanted)] == wanted, "in the order of the page, and none left out"
    assert all(seen), "focus is visible everywhere"


@pytest.mark.parametrize("name", ["bisected", "watched"])
def test_without_javascript_the_findings_and_small_tables_are_there(name, visit):
    page = visit(name, java_script_enabled=False)
    for finding in EVERY_VIEW[name].findings:
        assert page.locator("article").get_by_text(finding.message, exact=True).is_visible()
    assert "Charts and the tables of single tensors need JavaScript" in page.locator("main").inner_text()
    for check in EVERY_VIEW[name].checks:
        assert page.get_by_text(check.name).first.is_visible()


def test_charts_are_drawn_for_paper_before_it_is_laid_out(settled):
    page = settled("profiled", scheme="dark")
    ground = page.evaluate("ampdoctor.color('bg')")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("ampdoctor.color('bg')") == "#ffffff" != ground
    assert max(page.locator(".chart canvas").evaluate_all("(all) => all.map((c) => c.clientWidth)")) <= 672
    layers = page.locator(".chart").evaluate_all("(all) => all.map((c) => c.querySelectorAll('canvas').length)")
    assert layers == [1] * CHARTS["profiled"], "of two canvases the upper one hides the lower on paper"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("ampdoctor.color('bg')") == ground
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    assert not any(button.is_visible() for button in page.get_by_role("button").all())


def test_the_charts_open_on_what_the_first_finding_is_about(drawn):
    gradient = replace(UNDERFLOW, where=replace(UNDERFLOW.where, tensor="blocks.7.mlp.weight"))
    page = drawn(replace(PROFILED, findings=(gradient,)), DESK)
    chosen = page.get_by_label("Layer", exact=True).evaluate("(select) => select.selectedOptions[0].textContent")
    assert chosen == "blocks.7.mlp.weight"
    assert page.get_by_label("Tensors", exact=True).input_value() == "weight_grad"
    assert page.get_by_label("Share", exact=True).input_value() == "flushed"
    page = drawn(replace(PROFILED, findings=(replace(gradient, cause="grad_overflow"),)), DESK)
    assert page.get_by_label("Share", exact=True).input_value() == "overflowed"
    large = {**PROFILED.profile, "sites": [pages.site("large", "activation", 14, part="output")]}
    page = drawn(replace(PROFILED, findings=(), profile=large), DESK)
    assert page.get_by_label("Share", exact=True).input_value() == "overflowed", "nothing is flushed"
