from __future__ import annotations

from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from ampdoctor.reports.escape import code, fence, prose
from ampdoctor.reports.github import MAX_BYTES, render_markdown
from ampdoctor.reports.outline_values import summary_rows
from tests.reports.full_sample import full
from tests.samples import OVERFLOW, SICK


def page(text):
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def test_it_begins_with_the_verdict_and_what_to_do_and_folds_what_is_more():
    shown = page(render_markdown(full("a|b`c`")))
    assert "| ---" not in shown, "the tables are tables"
    assert shown.count("<details") == shown.count("</details>") > 3
    text = render_markdown(SICK)
    parts = ["## ampdoctor bisect-nan: `t5.py:make_run`", "**verdict: sick** (1 error, 1 warning)", "next: paste"]
    parts += ["<details open><summary><strong>error</strong>", "```python\nimport ampdoctor", "### loss scaling"]
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)


def test_the_layers_that_lose_most_have_a_table():
    (site,) = SICK.profile["sites"]
    formats = {"fp16": {"flushed": 0.5}, "fp16_recommended": {"flushed": 0.25}, "e5m2": {"flushed": 0.0}}
    layers = [{**site, "name": f"layer.{i}", "histogram": {"bins": [1]}, "formats": formats} for i in range(14)]
    layers[7]["formats"] = {**formats, "fp16": {"flushed": 0.75}}
    text = render_markdown(replace(SICK, profile={**SICK.profile, "sites": layers}))
    rows = [line for line in text.splitlines() if line.startswith("| `layer.")]
    assert rows[0] == "| `layer.7` | dW | 75.00% | 25.00% | 0.00% |"  # nothing was measured by a replay
    assert len(rows) == 14
    assert "<summary>2 more layers</summary>" in text


@pytest.mark.parametrize(("own", "fits", "rows"), [(2.0, 4.0, 3), (1.0, 4.0, 2), (4.0, 4.0, 2), (1.0, 1.0, 1)])
def test_a_loss_scale_has_one_row(own, fits, rows):
    kinds = {"weight_grad": {"flushed": 0.5, "subnormal": 0.0, "overflowed": 0.0, "relative_error": 0.0}}
    summary = dict.fromkeys(("fp16", "fp16_recommended", "fp16_unscaled"), kinds)
    found = [row[0] for row in summary_rows({"summary": summary, "loss_scale": own, "recommended_scale": fits})]
    assert len(found) == len(set(found)) == rows


def test_above_900_kb_it_ends_between_two_findings_with_a_line_that_says_so():
    many = tuple(replace(OVERFLOW, where=replace(OVERFLOW.where, module=f"{i}.ü" + "x" * 300)) for i in range(2000))
    text = render_markdown(replace(SICK, findings=many))
    assert MAX_BYTES - 5000 < len(text.encode()) <= MAX_BYTES
    assert text.endswith("`--report json=FILE` has all of it.**\n")
    assert text.count("<details") == text.count("</details>") > 100
    assert text.count("Truncated here") == 1
    assert "Truncated" not in render_markdown(full())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("31 % of the weights flush", "31 % of the weights flush"),
        ("tensor blocks.0.fc.weight, file m.pt;", "tensor `blocks.0.fc.weight`, file `m.pt`;"),
        ("(fp32_modules = a.b)", "(`fp32_modules` = `a.b`)"),
        ("aten.softmax(x)", "`aten.softmax(x)`"),
        ("give it logits.float(), and x.sum().", "give it `logits.float()`, and `x.sum()`."),
        ("(as f(x)) or f(x), (see f(x)).", "(as `f(x)`) or `f(x)`, (see `f(x)`)."),
        ("(a.b), a.b?!", "`(a.b)`, `a.b`?!"),
        ("sizes [16, 8], betas=(0.9, 0.95)", "sizes `[16, 8]`, `betas=(0.9, 0.95)`"),
        ("{'a': [1, 2]} (see [3]", "`{'a': [1, 2]}` (see `[3]`"),
        ("a|b", "<code>a&#124;b</code>"),
        ("@me #1 GH-2", "`@me` `#1` `GH-2`"),
        ("deadbee is no word, and 12345678 no number", "`deadbee` is no word, and `12345678` no number"),
        ("a\nb", "<code>a&#92;x0ab</code>"),
        ("", ""),
    ],
)
def test_words_are_prose_and_names_are_code(text, shown):
    assert prose(text) == shown


def test_a_name_keeps_its_spaces_and_a_fence_is_closed_by_its_own_marks_only():
    assert code("two words") == "`two words`"
    assert code(" led ") == "<code> led </code>"
    assert code("") == ""
    assert fence(["a", "````", "b"], "python").startswith("`````python\na\n````\nb\n`````")
