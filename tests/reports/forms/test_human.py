from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ampdoctor.evidence.report import Check, ErrorNote, Prescription, Report, Suppressed
from ampdoctor.evidence.report_replay import FINITE_CHECK
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.reports.github import render_markdown
from ampdoctor.reports.html_report import render_html
from ampdoctor.reports.human import Folded, breaks, render_human
from tests.browser.health_pages import watched
from tests.samples import HEALTHY, OVERFLOW, SICK, UNDERFLOW


def shown(report, width=200, **options):
    console = Console(file=io.StringIO(), width=width, force_terminal=options.pop("color", False))
    render_human(report, console, **options)
    return console.file.getvalue()


def test_what_a_watched_training_has_left_stands_before_what_to_do_and_its_command_is_never_folded():
    kept = {"health": "health", "bundle": f"health/bundle-{'9' * 60}", "model": "train.py"}
    text = shown(replace(SICK, command="run", run={"step": 7, "kept": kept}), width=60)
    _, _, rest = text.partition("\nkept\n")
    assert f"    ampdoctor bisect-nan {kept['bundle']} --model train.py\n" in rest
    assert rest.index(kept["bundle"]) < rest.index("next: ")


def test_figures_and_what_else_was_tried_are_there_with_verbose():
    assert "ampdoctor.apply(" in shown(SICK)
    assert "-v: figures, in plain torch, proof, also tried" in shown(SICK)
    for detail in ("output_amax_fp32  98304.0", "112.25", "dtype = bf16", "tried by replay: it does not cure"):
        assert detail not in shown(SICK)
        assert detail in shown(SICK, verbose=1)


@pytest.mark.parametrize(
    ("status", "words"),
    [("failed", "fails"), ("worse", "worse"), ("intervention", "intervention"), ("not_run", "not replayed")],
)
def test_no_other_status_reads_as_proved(status, words):
    prescription = Prescription(kind="code", value="add eps", status=status, reason="no batch left", detail="add eps")
    report = replace(SICK, findings=(replace(OVERFLOW, prescription=prescription),))
    fix = next(line for line in shown(report).splitlines() if line.startswith(("FIX", "TRIED")))
    assert words in fix
    assert fix.startswith("TRIED") == (status in ("failed", "worse"))
    assert "no batch left" in shown(report, verbose=1)
    assert "verified" not in shown(report, verbose=1)


def test_help_is_not_said_twice_and_is_the_fix_where_there_is_no_other():
    prescription = Prescription(kind="code", value="v", status="not_run", detail="Add eps.")
    finding = replace(OVERFLOW, prescription=prescription, help="Add eps.")
    assert " help " not in shown(replace(SICK, findings=(finding,)), verbose=1)
    assert "FIX    Or clamp." in shown(replace(SICK, findings=(replace(finding, prescription=None, help="Or clamp."),)))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_long_names_are_folded_and_never_cut(width):
    name = "layer." * 60 + "weight"
    finding = replace(UNDERFLOW, where=replace(UNDERFLOW.where, tensor=name, module=name))
    text = shown(replace(SICK, findings=(finding,)), width)
    together = "".join(line.strip() for line in text.splitlines())
    assert together.replace(" ", "").count(name) >= 1
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= width


def test_quiet_shows_findings_only():
    text = shown(SICK, quiet=True)
    assert text.startswith("ERROR  step 3  t5.py:41  encoder.block.3.ff.wo: a forward value")
    assert "verdict" not in text
    assert shown(HEALTHY, quiet=True) == ""


def test_quiet_still_names_what_could_not_be_examined():
    broken = ErrorNote(what="a.pt", kind="unreadable", message="a.pt is truncated.")
    assert shown(replace(HEALTHY, errors=(broken,), complete=False), quiet=True) == (
        "not examined: a.pt (unreadable): a.pt is truncated.\n"
    )


def test_of_many_findings_of_one_cause_the_first_is_shown_and_the_worst_others_are_named():
    many = tuple(
        replace(UNDERFLOW, where=replace(UNDERFLOW.where, tensor=f"tensor {i}"), evidence={"nans": i % 9})
        for i in range(20)
    )
    text = shown(replace(SICK, findings=(OVERFLOW, *many)))
    assert text.count("WARNING") == 1
    assert "19 more: tensor 8 (8 not finite), tensor 17 (8 not finite), tensor 7 (7 not finite)" in text
    assert shown(replace(SICK, findings=many), verbose=1).count("WARNING") == 20


def test_what_came_after_the_first_error_of_a_log_is_folded_under_it():
    report = watched("w")
    first = replace(OVERFLOW, where=replace(OVERFLOW.where, file=report.health.runs[0].source))
    later = replace(first, code="AMP723", name="scale-ratchets", where=replace(first.where, step=30))
    text = shown(replace(report, findings=(first, later)))
    assert "then: the loss scale falls and does not grow at step 30" in text
    assert "verdict: sick (1 error, 1 effect)" in text
    assert text.count("ERROR") == 1
    assert shown(replace(report, findings=(first, later)), verbose=1).count("FIX") == 1, "the cause's cures both"


def test_checks_are_statements():
    def check(name, result, **headroom):
        return Check(name=name, result=result, headroom=headroom)

    checks = (
        check("steps", "ok", steps=1, skipped=0, ranks=1),
        check("cast", "ok", flushed=0.0, subnormal=0.25, relative_error=0.00022145),
        check("fp16 range", "ok", log2=3.0),
        check("loss", "not in the log"),
        check("gradient norm", "not in the log"),
        check(FINITE_CHECK, "found", steps=1),
    )
    text = shown(Report(command="health", target={}, verdict="healthy", checks=checks))
    said = ["ok (1 step, 0 skipped)", "ok (25.00% subnormal, relative error 0.0002214)", "ok (8 times below the limit)"]
    assert [one for one in [*said, "loss, gradient norm", "see above"] if one not in text] == []


def test_a_value_met_in_a_file_is_not_said_to_be_born_there():
    where = replace(UNDERFLOW.where, phase="checkpoint", nonfinite="nan")
    text = shown(replace(SICK, findings=(replace(UNDERFLOW, where=where),)), verbose=1)
    assert "NaN is there" in text
    assert "born" not in text


def test_what_is_empty_has_no_line_and_a_zero_has_one():
    finding = replace(UNDERFLOW, evidence={"kernel": "", "names": [], "float64": {}, "share": 0.0, "finite": False})
    report = replace(SICK, findings=(finding,))
    for text in (shown(report, verbose=1), render_markdown(report), render_html(report)):
        lines = [re.sub(r"<[^>]*>|\W", " ", line).split() for line in text.partition("<script")[0].splitlines()]
        assert not {"kernel", "names", "float64"} & {line[0] for line in lines if line}
        assert "share" in text
        assert "finite" in text


def test_nested_figures_read_as_words_and_each_record_has_a_line():
    inputs = [{"dtype": "float16", "shape": [2, 3], "name": None}, {"dtype": "float32", "shape": [3]}]
    finding = replace(UNDERFLOW, evidence={"inputs": inputs, "float64": {"finite": True}, "empty": []})
    lines = [line.strip() for line in shown(replace(SICK, findings=(finding,)), verbose=1).splitlines()]
    assert "float64    finite true" in lines
    assert "inputs[0]  dtype float16, shape [2, 3]" in lines
    assert "inputs[1]  dtype float32, shape [3]" in lines


def test_a_command_that_recommends_no_scaler_does_not_praise_the_one_there():
    text = shown(replace(SICK, scaler=ScalerSection(current={"scale": 2.0**-56})))
    assert "scale=2^-56" in text
    assert "no change needed" not in text


def test_how_many_are_set_aside_and_by_what_is_one_line_and_each_is_listed_when_asked():
    aside = [("baseline", OVERFLOW, "base.json")] * 2 + [("ignore", UNDERFLOW, "the head is frozen [red]")]
    suppressed = tuple(Suppressed(finding=one, by=by, reason=reason) for by, one, reason in aside)
    report = replace(SICK, findings=(), suppressed=suppressed)
    assert "3 findings set aside: 2 by the baseline base.json, 1 by an ignore" in shown(report)
    text = " ".join(shown(report, 120, verbose=1).split())
    assert "ignore: the head is frozen [red]" in text
    assert text.count("ERROR AMP201 forward-overflow") == 2


NAME = "transformer_encoder_layers.3.feed_forward_network.0.weight"


def folded(renderable, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_name_is_folded_at_its_dots():
    assert folded(Folded(Text(NAME)), 40) == ["transformer_encoder_layers.3.", "feed_forward_network.0.weight"]
    assert folded(Folded(Text(NAME)), 22) == ["transformer_encoder_", "layers.3.", "feed_forward_network.", "0.weight"]


def test_lines_after_the_first_hang():
    assert folded(Folded(Text("one two three four"), hang=2), 9) == ["one two", "  three", "  four"]


@given(st.text(st.sampled_from("abc ./_-層\u0301"), max_size=60), st.integers(2, 30), st.integers(0, 3))
def test_nothing_is_lost_and_no_line_is_too_long(text, width, hang):
    hang = hang if width > 2 * hang else 0
    at = breaks(text, width, hang)
    assert at == sorted(set(at))
    assert all(0 < offset < len(text) for offset in at)
    parts = [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]
    assert "".join(parts) == text
    assert all(cell_len(part.rstrip()) <= width - (hang if index else 0) for index, part in enumerate(parts))
