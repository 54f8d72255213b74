from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ampdoctor.evidence.report import ErrorNote, Prescription, Suppressed
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.reports.html_report import render_html
from ampdoctor.reports.human import render_human
from ampdoctor.reports.markdown import render_markdown
from tests.samples import HEALTHY, INCOMPLETE, OVERFLOW, SICK, UNDERFLOW


def shown(report, width=200, **options):
    console = Console(file=io.StringIO(), width=width, force_terminal=options.pop("color", False))
    render_human(report, console, **options)
    return console.file.getvalue()


def test_a_finding_is_told_in_the_order_what_where_why_change_proof():
    text = shown(SICK)
    parts = ["ERROR AMP201 forward-overflow: the output reaches 98304", "where", "t5.py:41", "why", "forward overflow"]
    parts += ["change", "run encoder.block.3.ff.wo in fp32", "proof", "verified by replay", "ampdoctor rule AMP201"]
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)


def test_what_a_watched_training_has_left_stands_before_what_to_do_and_its_command_is_never_folded():
    kept = {"health": "health", "bundle": f"health/bundle-{'9' * 60}", "model": "train.py"}
    text = shown(replace(SICK, command="run", run={"step": 7, "kept": kept}), width=60)
    head, _, rest = text.partition("\nkept\n")
    assert "step 7" in head
    assert "health" not in head
    assert f"    ampdoctor bisect-nan {kept['bundle']} --model train.py\n" in rest
    assert rest.index(kept["bundle"]) < rest.index("next: ")


def test_the_address_is_complete():
    line = next(line for line in shown(SICK).splitlines() if "where" in line)
    for part in ("step 3", "micro-batch 1", "forward", "module encoder.block.3.ff.wo (call 2)", "aten.linear", "Inf"):
        assert part in line


def test_the_numbers_are_there_and_nested_ones_with_verbose():
    assert "output_amax_fp32 = 98304.0" in shown(SICK)
    assert "112.25" not in shown(SICK)
    assert "1 more figure with -v" in shown(SICK)
    assert "112.25" in shown(SICK, verbose=1)


def test_the_exact_change_is_there_to_copy_and_alternatives_with_verbose():
    assert "fp32_modules = encoder.block.3.ff.wo" in shown(SICK)
    assert "1 other change tried" in shown(SICK)
    assert "dtype = bf16: tried by replay: it does not cure" in shown(SICK, verbose=1)


@pytest.mark.parametrize(
    ("status", "words"),
    [("failed", "does not cure"), ("worse", "worse"), ("intervention", "intervention"), ("not_run", "not replayed")],
)
def test_no_other_status_reads_as_proved(status, words):
    prescription = Prescription(kind="code", value="add eps", status=status, reason="no batch left", detail="add eps")
    text = shown(replace(SICK, findings=(replace(OVERFLOW, prescription=prescription),)))
    proof = next(line for line in text.splitlines() if "proof" in line)
    assert words in proof
    assert "no batch left" in proof
    assert "verified" not in text


@pytest.mark.parametrize(
    ("kind", "status", "label"),
    [
        ("code", "failed", "advice"),
        ("code", "not_run", "advice"),
        ("code", "worse", "change"),
        ("code", "verified", "change"),
        ("code", "intervention", "change"),
        ("dtype", "not_run", "change"),
    ],
)
def test_code_that_is_not_proved_to_cure_is_advice_and_is_not_said_twice(kind, status, label):
    prescription = Prescription(kind=kind, value="v", status=status, detail="Add eps.")
    finding = replace(OVERFLOW, prescription=prescription, help="Add eps.")
    lines = [line.split() for line in shown(replace(SICK, findings=(finding,))).splitlines()]
    assert [line[0] for line in lines if line[1:3] == ["Add", "eps."]] == [label]
    lines = shown(replace(SICK, findings=(replace(finding, help="Or clamp."),))).splitlines()
    assert ["help", "Or", "clamp."] in [line.split() for line in lines]


def test_the_root_module_is_the_whole_model():
    prescription = Prescription(kind="fp32_modules", value=("",), status="verified", detail="run all in fp32")
    text = shown(replace(SICK, findings=(replace(OVERFLOW, prescription=prescription),)))
    assert "run all in fp32 (fp32_modules = the whole model)" in text


def test_severity_is_a_word_without_colour():
    assert "WARNING AMP301" in shown(SICK)
    assert "\x1b[" not in shown(SICK)
    assert "\x1b[" in shown(SICK, color=True)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_long_names_are_folded_and_never_cut(width):
    name = "layer." * 60 + "weight"
    finding = replace(UNDERFLOW, where=replace(UNDERFLOW.where, tensor=name, module=name))
    text = shown(replace(SICK, findings=(finding,)), width)
    together = "".join(line.strip() for line in text.splitlines())
    assert together.replace(" ", "").count(name) >= 2
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= width


def test_the_verdict_says_what_is_missing():
    text = shown(INCOMPLETE)
    assert "inconclusive" in text
    assert "incomplete" in text
    assert "shard-2.safetensors (truncated): the file ends early" in text
    assert "extra.bin: a Git LFS pointer" in shown(SICK)


def test_a_healthy_report_lists_what_was_checked():
    text = shown(HEALTHY)
    assert "verdict: healthy" in text
    assert "finite weights: ok (log2=7.5)" in text


def test_quiet_shows_findings_only():
    text = shown(SICK, quiet=True)
    assert text.strip().startswith("ERROR AMP201")
    assert "verdict" not in text
    assert shown(HEALTHY, quiet=True) == ""


def test_quiet_still_names_what_could_not_be_examined():
    broken = ErrorNote(what="a.pt", kind="unreadable", message="a.pt is truncated.")
    assert shown(replace(HEALTHY, errors=(broken,), complete=False), quiet=True) == (
        "not examined: a.pt (unreadable): a.pt is truncated.\n"
    )


def test_the_scaler_is_shown_with_its_effect():
    text = shown(SICK)
    assert "init_scale=1048576.0" in text
    predicted = next(line.split() for line in text.splitlines() if line.strip().startswith("predicted"))
    assert predicted == ["predicted", "0.00%", "<0.01%", "12.50%", "0.0001"]
    kept = shown(replace(SICK, scaler=replace(SICK.scaler, change=False)))
    assert "no change needed" in kept


def test_fp16_comes_before_bf16_in_the_summary():
    text = shown(SICK)
    lines = [line.split() for line in text.splitlines() if " dW " in line and "%" in line]
    assert [line[0] for line in lines if line[0] != "dW"] == ["fp16", "bf16"]
    assert lines[0] == ["fp16", "at", "1024", "dW", "31.00%", "20.00%", "0.00%", "0.1"]


def test_of_many_findings_of_one_code_the_first_is_shown_in_full_and_the_others_in_a_line():
    many = tuple(
        replace(UNDERFLOW, message=f"tensor {i} flushes", where=replace(UNDERFLOW.where, tensor=f"tensor {i}"))
        for i in range(20)
    )
    text = shown(replace(SICK, findings=(OVERFLOW, *many)))
    assert text.count("WARNING AMP301") == 1
    assert "19 more AMP301 gradient-underflow" in text
    assert "  tensor 12 flushes" in text
    assert "tensor 13 flushes" not in text
    assert "... and 7 more" in text
    assert shown(replace(SICK, findings=many), verbose=1).count("WARNING AMP301") == 20
    assert shown(replace(SICK, findings=many[:3])).count("WARNING AMP301") == 3


def test_a_value_met_in_a_file_is_not_said_to_be_born_there():
    where = replace(UNDERFLOW.where, phase="checkpoint", nonfinite="nan")
    text = shown(replace(SICK, findings=(replace(UNDERFLOW, where=where),)))
    assert "NaN is there" in text
    assert "born" not in text


def test_what_is_unknown_is_left_out_and_a_small_power_of_two_reads_as_one():
    finding = replace(UNDERFLOW, evidence={"amax": None, "scale": 2.0**-56, "third": -(2.0**-20), "large": 65536.0})
    text = shown(replace(SICK, findings=(finding,)))
    assert "amax" not in text
    assert "scale = 2^-56" in text
    assert "third = -2^-20" in text
    assert "large = 65536.0" in text


def test_what_is_empty_has_no_line_and_a_zero_has_one():
    finding = replace(UNDERFLOW, evidence={"kernel": "", "names": [], "float64": {}, "share": 0.0, "finite": False})
    report = replace(SICK, findings=(finding,))
    for text in (shown(report, verbose=1), render_markdown(report), render_html(report)):
        assert not {word for word in ("kernel", "names", "float64") if f"{word} =" in text or f">{word}<" in text}
        assert "share" in text
        assert "finite" in text


def test_the_last_line_speaks_of_no_option_where_there_is_no_terminal():
    known = Suppressed(finding=UNDERFLOW, by="baseline", reason="b.json")
    report = replace(SICK, verdict="healthy", findings=(), suppressed=(known,))
    assert "(-v)" not in render_markdown(report) + render_html(report)
    assert "nothing new" in render_markdown(report)


def test_nested_figures_read_as_words_and_each_record_has_a_line():
    inputs = [{"dtype": "float16", "shape": [2, 3], "name": None}, {"dtype": "float32", "shape": [3]}]
    finding = replace(UNDERFLOW, evidence={"inputs": inputs, "float64": {"finite": True}, "empty": []})
    lines = [line.strip() for line in shown(replace(SICK, findings=(finding,)), verbose=1).splitlines()]
    assert any(line.endswith("float64 = finite true") for line in lines)
    assert "inputs[0] = dtype float16, shape [2, 3]" in lines
    assert "inputs[1] = dtype float32, shape [3]" in lines


def test_only_the_severity_has_its_colour():
    text = shown(SICK, color=True)
    head = next(line for line in text.splitlines() if "AMP201" in line)
    assert head.startswith("\x1b[1;31mERROR\x1b[0m ")
    assert head.count("\x1b[1;31m") == 1
    assert head.endswith(": the output reaches 98304, beyond fp16's 65504")


def test_a_folded_line_of_a_list_stays_indented():
    lines = shown(HEALTHY, 20).splitlines()
    listed = lines[lines.index("checked") + 1 : -1]
    listed = listed[: listed.index("")]
    assert len(listed) > 1
    assert all(line.startswith("  ") for line in listed)


def test_a_command_that_recommends_no_scaler_does_not_praise_the_one_there():
    text = shown(replace(SICK, scaler=ScalerSection(current={"scale": 2.0**-56})))
    assert "scale=2^-56" in text
    assert "no change needed" not in text


def test_notes_of_a_replay_have_a_line_each():
    text = shown(replace(SICK, run={"device": "cpu", "notes": ["a note", "another, with a comma"]}))
    assert "note: a note\n" in text
    assert "note: another, with a comma\n" in text
    assert "notes" not in shown(replace(SICK, run={"device": "cpu", "notes": []}))
