"""Names and orders in a browser: no name is cut on a desk or a phone, what is worst stands first, tables fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.evidence.checkpoint_stats import CastShares
from ampdoctor.evidence.json_records import from_plain
from ampdoctor.evidence.report_replay import PathNode
from ampdoctor.numerics.histogram import Histogram
from tests.browser.conftest import DESK, PHONE
from tests.browser.pages import BISECTED, EVERY_VIEW, HOSTILE, LAYERS, PROFILED, RUN_SCALE, node, site, tensor

pytestmark = pytest.mark.slow
LONG = "transformer.encoder_blocks.11.cross_attention_block_with_a_long_name.output_projection"
LABELS = """(chart) => {
    const drawn = echarts.getInstanceByDom(chart).getZr().storage.getDisplayList(true);
    const labels = new Map();
    for (const span of drawn.filter((shape) => shape.type === "tspan")) {
        const box = span.getBoundingRect().clone();
        if (span.transform) box.applyTransform(span.transform);
        const label = labels.get(span.parent) ?? { text: "", boxes: [] };
        label.text += span.style.text;
        label.boxes.push([box.x, box.y, box.x + box.width, box.y + box.height]);
        labels.set(span.parent, label);
    }
    return { width: chart.clientWidth, height: chart.clientHeight, labels: [...labels.values()] };
}"""
"""What is written in a chart, as drawn: each label's text, its lines joined, and the box of each line in pixels."""


def whole(page, selector):
    """The labels of a chart: none leaves the drawing, and no two lines lie on each other."""
    found = page.locator(selector).first.evaluate(LABELS)
    boxes = [box for label in found["labels"] for box in label["boxes"]]
    for left, top, right, bottom in boxes:
        assert left >= 0
        assert top >= -1
        assert right <= found["width"]
        assert bottom <= found["height"] + 1
    beside = sorted(box for label in found["labels"] for box in label["boxes"] if len(label["boxes"]) > 1)
    for one in beside:
        for other in beside:
            aside = min(one[2], other[2]) <= max(one[0], other[0])
            assert one == other or aside or min(one[3], other[3]) - max(one[1], other[1]) <= 3, (
                "lines lie on each other"
            )
    return {label["text"].replace("\u2003", "") for label in found["labels"]}


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_layers_have_their_whole_names_beside_the_chart(viewport, drawn):
    names = [LONG, *(f"blocks.{n}.attention.out.input" for n in range(12)), "no_dot_" * 12]
    sites = [site(name, "activation_grad", -20, part="output") for name in names]
    page = drawn(replace(PROFILED, profile={**PROFILED.profile, "sites": sites}), viewport)
    assert set(names) <= whole(page, "#heatmap-view .chart")


def test_the_path_has_the_whole_names_of_its_modules(drawn):
    nodes = [
        from_plain(PathNode, node(9, "before", LONG, "aten.linear", 3.0)),
        *(n for n in BISECTED.path.nodes if n.module != HOSTILE),
    ]
    page = drawn(replace(BISECTED, path=replace(BISECTED.path, nodes=tuple(nodes))), PHONE)
    wanted = {*LONG.split("."), "encoder", "block", "ff", "wo", "(the root's own code)"}
    assert wanted <= whole(page, "#path-view .chart")


def test_the_heat_map_begins_with_what_the_run_flushes_most(settled):
    page = settled("profiled")
    chart = page.locator("#heatmap-view .chart")
    read = "(chart) => echarts.getInstanceByDom(chart).getOption().yAxis[0].data"
    measured = {s["name"]: s for s in PROFILED.profile["sites"] if s["kind"] == "activation_grad"}
    shown = [name for name in chart.evaluate(read) if name.startswith("blocks")]
    flushed = [Histogram.from_dict(measured[name]["histogram"]).flushed("fp16", RUN_SCALE) for name in shown]
    assert flushed == sorted(flushed, reverse=True)
    assert flushed[0] > flushed[-1]
    page.get_by_label("Share", exact=True).select_option("overflowed")
    assert chart.evaluate(read)[0].endswith(".input"), "the only one that reaches beyond fp16"
    page.get_by_label("Order", exact=True).select_option("name")
    shown = [name for name in chart.evaluate(read) if name.startswith("blocks")]
    assert shown == [f"blocks.{n}.mlp" for n in range(LAYERS)]


def sick():
    """Six tensors, the sick ones last: what a table in the file's order would hide."""
    shares = CastShares(flushed=0.0, subnormal=0.0, overflowed=0.0)
    fine = replace(tensor(0), role="weight", entry="", fp16=shares)
    moment = replace(fine, name="c", role="moment", entry="exp_avg_sq", fp16=replace(shares, flushed=1.0))
    flushed = replace(fine, name="d", fp16=replace(shares, flushed=0.5))
    over = replace(fine, name="e", fp16=replace(shares, overflowed=0.25))
    tensors = (replace(fine, name="b"), replace(fine, name="a"), moment, flushed, over, replace(fine, name="f", inf=2))
    return replace(EVERY_VIEW["scanned"], tensors=tensors)


def test_sick_tensors_stand_first_and_can_be_ordered_by_name(drawn):
    page = drawn(sick(), DESK)
    page.locator("#tensors summary").first.click()  # closed, since nothing was found: these are no findings
    view = page.locator("#tensors-view")
    names = lambda: view.locator("td.name").all_inner_texts()  # noqa: E731
    assert names() == ["f", "e", "d", "b", "a", "c: exp_avg_sq"]
    view.get_by_label("Order", exact=True).select_option("by name")
    assert names() == ["a", "b", "c: exp_avg_sq", "d", "e", "f"]
    view.get_by_label("Order", exact=True).select_option("as in the checkpoint")
    assert names() == ["b", "a", "c: exp_avg_sq", "d", "e", "f"]
    view.get_by_role("columnheader", name="Inf").get_by_role("button").click()
    assert names()[0] == "f"
    assert view.get_by_label("Order", exact=True).input_value() == ""


def test_every_cell_of_the_tensors_is_in_sight_of_a_phone(drawn):
    wide = replace(tensor(1), name=f"{LONG}.weight", shape=(3072, 768, 16), dtype="float8_e4m3fn", nan=31)
    page = drawn(replace(sick(), tensors=(wide, *sick().tensors)), PHONE)
    scroller = page.locator("#tensors-view .scroll")
    assert scroller.evaluate("(e) => e.scrollWidth <= e.clientWidth")
    edges = scroller.locator("td").evaluate_all("(all) => all.map((e) => e.getBoundingClientRect().right)")
    assert max(edges) <= PHONE["width"]
    heading = "(e) => getComputedStyle(e, '::before').content"
    assert scroller.locator("td[data-label='NaN']").first.evaluate(heading) == '"NaN"'
