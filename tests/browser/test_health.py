"""Runs over their steps in a browser: one axis for all panels, alerts that open, maps, several runs, a large page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.browser.conftest import DESK, wait_until
from tests.browser.health_pages import alert, health_report, health_run
from tests.browser.pages import EVERY_VIEW, HOSTILE

pytestmark = pytest.mark.slow
RUN = EVERY_VIEW["watched"].health.runs[0]
SHOWN = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b").replace("\u2028", "\\u2028")
WINDOWS = """() => [...document.querySelectorAll("#lanes-view .chart")].map((chart) => {
    const [zoom] = echarts.getInstanceByDom(chart).getOption().dataZoom;
    return [Math.round(zoom.startValue), Math.round(zoom.endValue)];
})"""


def windows(page):
    """The window of each chart on the common axis, as the chart itself has it."""
    return {tuple(window) for window in page.evaluate(WINDOWS)}


def zoomed(page, low, high):
    page.get_by_label("From", exact=True).fill(str(low))
    page.get_by_label("To", exact=True).fill(str(high))
    page.get_by_label("To", exact=True).press("Enter")


def readout(page, lane):
    return page.locator(f"#lanes-view .lane-{lane} .readout").inner_text()


def titles(page):
    return page.locator("#lanes-view .lane figcaption strong").all_inner_texts()


def test_numbers_come_out_of_their_packing_as_the_report_has_them(visit):
    page = visit("watched")
    found = page.evaluate(
        """() => ampdoctor.health.runs.map((run) => ({
            last: [...run.axis.last], tokens: [...run.axis.tokens],
            curves: Object.fromEntries(Object.entries(run.curves).map(([name, { middle }]) =>
                [name, [...middle].map((v) => (v === v ? v : null))])),
            map: [...run.maps[0].values].map((v) => (v === v ? v : null)), names: run.maps[0].tensors }))"""
    )[0]
    assert found["last"] == list(RUN.axis.last)
    assert found["tokens"] == list(RUN.axis.tokens)
    for curve in RUN.curves:
        for shown, value in zip(found["curves"][curve.name], curve.middle, strict=True):
            assert shown == (None if value is None else pytest.approx(value, rel=1e-6))
    cells = [value for row in RUN.maps[0].values for value in row]
    assert [v is None for v in found["map"]] == [v is None for v in cells]
    assert [v for v in found["map"] if v is not None] == pytest.approx([v for v in cells if v is not None], rel=1e-6)
    assert len(found["names"]) == len(RUN.maps[0].tensors)


def test_a_panel_is_there_for_what_the_log_has_and_for_nothing_else(drawn):
    run = health_run()
    only = replace(
        run, curves=run.curves[:1], maps=(), scalers=(), checkpoints=(), looks=(), actions=(),
        axis=replace(run.axis, samples=None, tokens=None),
    )  # fmt: skip
    page = drawn(health_report(only), DESK)
    assert titles(page) == ["Loss"]
    assert page.get_by_label("Axis", exact=True).count() == 0
    assert page.locator("#maps-view *").count() == 0
    assert "no alerts" in page.locator("#alerts-view").inner_text()


def test_all_panels_zoom_together_by_numbers_buttons_a_drag_and_the_wheel(settled):
    page = settled("watched")
    page.locator(".menu summary").click()
    whole = (RUN.first_step, RUN.last_step)
    assert windows(page) == {whole}
    zoomed(page, 8000, "9,000")
    wait_until(page, lambda: windows(page) == {(8000, 9000)})
    page.get_by_role("button", name="Whole run").click()
    wait_until(page, lambda: windows(page) == {whole})

    chart = page.locator("#lanes-view .lane-norm .chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    across = box["width"] - 64 - 14
    page.mouse.move(box["x"] + 64 + 0.25 * across, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 64 + 0.5 * across, box["y"] + 60, steps=4)
    page.mouse.up()
    wait_until(page, lambda: windows(page) != {whole} and len(windows(page)) == 1)
    ((low, high),) = windows(page)
    assert low == pytest.approx(0.25 * RUN.last_step, abs=30)
    assert high == pytest.approx(0.5 * RUN.last_step, abs=30)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    wait_until(page, lambda: len(windows(page)) == 1 and windows(page) != {(low, high)})
    ((nearer, farther),) = windows(page)
    assert low <= nearer < farther <= high
    page.mouse.dblclick(box["x"] + 300, box["y"] + 60)
    wait_until(page, lambda: windows(page) == {whole})
    page.locator(".lane-flags .chart").hover(position={"x": 500, "y": 10})
    page.mouse.wheel(0, -240)
    wait_until(page, lambda: len(windows(page)) == 1 and windows(page) != {whole})
    page.get_by_role("button", name="Whole run").click()
    zoomed(page, 9000, 8000)
    assert windows(page) == {(9000, 9999)}, "a window that ends before it begins is none"


def test_the_values_of_every_panel_are_read_at_one_place_by_mouse_and_by_keyboard(settled):
    page = settled("watched")
    assert "not finite" in readout(page, "loss")
    chart = page.locator("#lanes-view .lane-loss .chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    span = 199
    share = (RUN.axis.last[span] - RUN.first_step) / (RUN.last_step - RUN.first_step)
    page.mouse.move(box["x"] + 64 + share * (box["width"] - 64 - 14) - 1, box["y"] + 50)
    loss = next(curve for curve in RUN.curves if curve.name == "loss").middle[span]
    wait_until(page, lambda: readout(page, "loss").split()[-1] == f"{loss:.3g}")
    assert "2^18" in readout(page, "scale")
    crosses = page.locator("#lanes-view .cross:not([hidden])")
    assert crosses.count() == page.locator("#lanes-view .chart").count()
    lefts = page.evaluate(
        "() => [...document.querySelectorAll('#lanes-view .cross')].map((it) => it.getBoundingClientRect().left)"
    )
    assert max(lefts) - min(lefts) <= 1, "one line over all panels"

    page.locator(".menu summary").click()
    cursor = page.get_by_label("Read at", exact=True)
    cursor.focus()
    page.keyboard.press("Home")
    assert cursor.get_attribute("aria-valuetext") == "step 0"
    first = RUN.curves[0].middle[0]
    assert readout(page, "loss").split()[-1] == f"{first:.3g}"
    page.keyboard.press("End")
    assert "not finite" in readout(page, "loss")


def test_a_flag_and_the_list_show_an_alert_on_the_charts_and_lead_to_its_finding(settled):
    page = settled("watched")
    report = EVERY_VIEW["watched"]
    button = page.get_by_role("button", name=re.compile("gradient-norm-jump")).nth(1)
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert report.findings[1].message in page.locator("#alerts-view [role=status]").inner_text()
    ((low, high),) = windows(page)
    assert low < report.findings[1].where.step < high
    assert high - low < 0.1 * RUN.last_step
    page.locator("#lanes-view .lane-loss .chart").dblclick()
    flag = page.evaluate(
        """() => { const chart = echarts.getInstanceByDom(document.querySelector(".lane-flags .chart"));
            const marks = chart.getOption().series[0].data.filter(({ value }) => value[1] === "alerts");
            return chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, marks.at(-1).value); }"""
    )
    page.locator(".lane-flags .chart").click(position={"x": flag[0], "y": flag[1]})
    assert page.locator(".alerts [aria-pressed=true]").inner_text().startswith("error")
    page.get_by_role("link", name="AMP725: the finding").click()
    top = "(it) => it.getBoundingClientRect().top"
    wait_until(page, lambda: 0 < page.locator("#finding-0").evaluate(top) < DESK["height"])


def curve(run, name, values, **more):
    values = tuple(values)
    made = replace(next(c for c in run.curves if c.name == name), low=values, middle=values, high=values, **more)
    return replace(run, curves=tuple(made if c.name == name else c for c in run.curves))


def test_what_does_not_change_or_has_too_few_points_is_a_number(drawn):
    run = curve(health_run(breaks=False), "learning_rate", [3e-4] * 400)
    run = curve(run, "memory_bytes", [None] * 398 + [1e9, 2e9])
    page = drawn(health_report(replace(run, precision="bf16")), DESK)
    said = page.locator("#lanes-view .numbers").inner_text()
    assert re.search(r"Learning rate\s+3e-4 throughout", said)
    assert re.search(r"Memory\s+1 GB at step 9,974, 2 GB at step 9,999", said)
    assert {"Learning rate", "Memory", "Headroom"}.isdisjoint(titles(page)), "bf16 has no headroom to speak of"
    assert "p99" in page.locator("#lanes-view .lane-seconds figcaption").inner_text()
    assert "headroom" not in page.locator("#maps-view select").first.inner_text()


def test_a_loss_scale_of_zero_lies_on_a_line_of_its_own(drawn):
    run = curve(health_run(breaks=False), "loss_scale", [2.0**10] * 200 + [2.0**5] * 100 + [0.0] * 100)
    page = drawn(health_report(run), DESK)
    assert titles(page).count("Loss scale") == 1
    least, floor, axis = page.evaluate(
        """() => { const chart = document.querySelector("#lanes-view .lane-scale .chart");
            const { series, yAxis } = echarts.getInstanceByDom(chart).getOption();
            const line = series.find(({ id }) => id === "0 loss_scale").data.map(([, y]) => y);
            return [line.at(-1), series.find(({ id }) => id === "zero").data[0][1], yAxis[0].min]; }"""
    )
    assert least == floor == axis < 5
    assert "0" in page.locator("#lanes-view .lane-scale .readout").inner_text()


def test_each_scaler_with_a_name_is_a_line_of_the_one_chart(drawn):
    run = health_run(breaks=False)
    two = tuple(replace(run.scalers[0], scaler=name) for name in ("generator", HOSTILE))
    page = drawn(health_report(replace(run, scalers=two)), DESK)
    assert {"generator", SHOWN} <= set(page.locator("#lanes-view .lane-scale .key").all_inner_texts())


def test_without_such_a_finding_the_heat_map_opens_on_what_varies_most(drawn):
    run = health_run()
    still = tuple(replace(m, values=((1e-3,) * len(m.steps),) * len(m.tensors)) for m in run.maps if m.name != "amax")
    page = drawn(health_report(replace(run, maps=(*still, run.maps[1]))), DESK)
    shown = page.locator("#maps-view").get_by_label("Show", exact=True).locator("option:checked")
    assert shown.inner_text() == "largest magnitude of gradients"


def test_the_heat_map_opens_on_what_the_worst_finding_is_about_and_turns_to_an_alert_that_is_shown(drawn):
    run = health_run()
    about = {name: run.maps[0].tensors[row] for name, row in (("flushed_share", 3), ("log2_headroom", 5))}
    worst = replace(alert(run, 0.9, tensor=about["flushed_share"]), evidence={"flushed_share_before": 0.1})
    other = replace(alert(run, 0.3, "note", "AMP725", tensor=about["log2_headroom"]), evidence={"log2_headroom": 1})
    page = drawn(health_report(run, findings=(worst, other)), DESK)
    chosen = page.locator("#maps-view").get_by_label("Show", exact=True).locator("option:checked")
    assert chosen.inner_text() == "share flushed to zero of gradients"
    assert about["flushed_share"] in page.locator("#map-about").inner_text()
    page.get_by_role("button", name=re.compile("note step")).click()
    assert chosen.inner_text() == "headroom in powers of two of gradients"
    assert about["log2_headroom"] in page.locator("#map-about").inner_text()


def test_runs_lie_on_each_other_and_can_be_taken_away(settled):
    page = settled("beside")
    names = page.locator("#health h3[id^=run-]").all_inner_texts()
    assert [name[0] for name in names] == ["A", "B", "C"]
    series = """() => echarts.getInstanceByDom(document.querySelector("#health .lane-loss .chart")).getOption().series
        .filter((one) => one.type === "line" && one.id !== "zero").map((one) => [one.color, one.lineStyle.type])"""
    lines = page.evaluate(series)
    assert len(lines) == len({tuple(line) for line in lines}) == 3
    assert len({dash for _, dash in lines}) == 3, "a dash of its own for who cannot tell the colours"
    assert page.locator("#lanes-view .lane-loss .readout dt").count() == 3
    page.get_by_role("checkbox", name="B gpt2-bf16").uncheck()
    wait_until(page, lambda: len(page.evaluate(series)) == 2)
    assert page.locator("#lanes-view .lane-loss .readout dt").all_inner_texts() == ["A", "C"]


def test_a_run_that_does_not_count_tokens_is_named_where_it_is_missing(drawn):
    counts, does_not = health_run(seed=1), health_run("other", seed=2)
    does_not = replace(does_not, axis=replace(does_not.axis, tokens=None))
    page = drawn(health_report(counts, does_not, axis="tokens"), DESK)
    assert "B: the log does not say how many tokens it has seen." in page.locator(".health-controls").inner_text()


def test_the_heat_map_has_its_numbers_orders_and_names(settled):
    page = settled("watched")
    view = page.locator("#maps-view")
    view.get_by_label("Show", exact=True).select_option(label="share flushed to zero of gradients")
    page.get_by_label("Show as tables").check()
    first = view.locator("tbody tr").first.locator("td").all_inner_texts()
    one = next(m for m in RUN.maps if m.name == "flushed_share")
    assert first[0] == f"h.0.{SHOWN}"
    assert float(first[2].rstrip("%")) == pytest.approx(100 * one.values[0][0], abs=0.006)
    view.get_by_label("Order", exact=True).select_option("worst")
    worst = max(range(len(one.tensors)), key=lambda row: max(v for v in one.values[row] if v is not None))
    assert view.locator("tbody tr td").first.inner_text() == f"h.{worst}.{SHOWN}"
    assert "24 most conspicuous of 150" in view.inner_text()


def test_a_cell_under_the_mouse_says_its_tensor_step_and_value_as_text(settled):
    page = settled("watched")
    chart = page.locator("#maps-view .chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    middle = (max(box["y"], 300) + min(box["y"] + box["height"] - 30, DESK["height"])) / 2
    page.mouse.move(box["x"] + 700, middle)
    tip = chart.locator(".tip")
    tip.wait_for()
    name, said = tip.locator("div").all_inner_texts()
    row = next(row for row in range(len(RUN.maps[0].tensors)) if name == f"h.{row}.{SHOWN}")
    step, value = re.fullmatch(r"step ([\d,]+): ([\d.e-]+)", said).groups()
    column = RUN.maps[0].steps.index(int(step.replace(",", "")))
    assert float(value) == pytest.approx(RUN.maps[0].values[row][column], rel=0.006)
    assert chart.locator("img, b, script").count() == 0
    page.mouse.move(box["x"] + 10, middle)
    assert tip.is_hidden()


def test_the_tables_say_what_the_panels_draw(settled):
    page = settled("watched")
    page.get_by_label("Show as tables").check()
    assert page.locator("#lanes-view .chart:visible").count() == 0
    lane = page.locator("#lanes-view .lane-loss")
    row = lane.locator("tbody tr").first.locator("td").all_inner_texts()
    curve = RUN.curves[0]
    assert row == ["0", "24", *(f"{v[0]:.3g}" for v in (curve.low, curve.middle, curve.high)), "0"]
