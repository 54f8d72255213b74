from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.reports.github import MAX_ANNOTATIONS, render_github
from tests.samples import EVERY, HEALTHY, INCOMPLETE, NOT_REPRODUCED, OVERFLOW, SICK, UNDERFLOW


def commands(report):
    return [line for line in render_github(report).splitlines() if line.startswith("::")]


def test_a_finding_of_a_source_line_is_an_annotation_of_that_line():
    error, warning = commands(SICK)
    assert error.startswith("::error file=t5.py,line=41,title=AMP201 forward-overflow::the output reaches 98304")
    assert "%0Achange: run encoder.block.3.ff.wo in fp32" in error
    assert "%0Aproof: verified by replay" in error
    assert warning.startswith("::warning file=model.safetensors,title=AMP301 gradient-underflow::31 %25 of")


def test_ten_annotations_are_made_and_the_last_counts_the_others():
    report = replace(SICK, findings=(OVERFLOW,) * 14)
    lines = commands(report)
    assert len(lines) == MAX_ANNOTATIONS == 10
    assert [("more" in line) for line in lines] == [False] * 9 + [True]
    assert lines[-1].endswith("%0Aand 4 more: the whole report has them")
    assert "more" not in "".join(commands(replace(SICK, findings=(OVERFLOW,) * 10)))


def test_every_annotation_is_of_a_file_from_the_root_that_is_known():
    target = {**INCOMPLETE.target, "repository": {"root": "/repo", "folder": "training"}}
    lines = commands(replace(INCOMPLETE, target=target, findings=(OVERFLOW, UNDERFLOW)))
    files = [line.partition("file=")[2].partition(",")[0] for line in lines]
    model = "training/model.safetensors"
    assert sorted(set(files)) == [model, "training/t5.py"]


def test_what_was_not_examined_comes_before_every_finding():
    lines = commands(replace(INCOMPLETE, findings=(OVERFLOW,) * 12, verdict="sick"))
    assert lines[0].startswith("::error file=model.safetensors,title=ampdoctor%3A not examined::shard-2.safetensors")
    assert lines[-1].endswith("and 3 more: the whole report has them")


def test_a_run_that_has_no_answer_is_an_error():
    assert [line.partition(" ")[0] for line in commands(NOT_REPRODUCED)] == ["::error"]
    assert "not reproduced" in commands(NOT_REPRODUCED)[0]
    assert commands(HEALTHY) == []


@pytest.mark.parametrize("name", EVERY)
def test_the_last_line_says_the_verdict_and_is_no_command(name):
    last = render_github(EVERY[name]).splitlines()[-1]
    assert last.startswith(f"ampdoctor {EVERY[name].command}: {EVERY[name].verdict.replace('_', ' ')}")


def test_marks_that_end_a_property_or_a_line_are_escaped():
    where = replace(UNDERFLOW.where, file="a,b:c%\n.pt")
    (line,) = commands(replace(HEALTHY, target={"path": "run"}, findings=(replace(UNDERFLOW, where=where),)))
    assert line.startswith("::warning file=run/a%2Cb%3Ac%25\\x0a.pt,title=")
