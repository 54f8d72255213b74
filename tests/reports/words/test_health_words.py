from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.evidence.report_health import (
    ActionMark,
    CheckpointMark,
    Curve,
    HealthAxis,
    HealthRun,
    HealthSection,
    LookMark,
    ScalerHistory,
)
from ampdoctor.evidence.report_scaler import ScalePath, ScalerArguments
from ampdoctor.reports import outline_sections
from ampdoctor.reports import text as words
from ampdoctor.reports.formats import RenderOptions, renderer
from ampdoctor.reports.github import render_markdown

RUN = HealthRun(
    name="small", source="logs/small", format="ampdoctor", steps=3, last_step=2, axis=HealthAxis(first=(), last=())
)
LOSS = Curve(name="loss", low=(1.0, None), middle=(3.0, None, 1.5), high=(5.0, None), nonfinite=(0, 2))
PATH = ScalePath(points=((0.0, 65536.0), (3.0, 32768.0)), changes=2, skips=(2,), skipped=1, replica=0)
USED = ScalerArguments(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)


def facts(**fields):
    return list(outline_sections.facts(replace(RUN, **fields)))


def test_a_run_in_a_line():
    assert outline_sections.run_line(RUN) == "steps 0 to 2"
    cut = replace(RUN, steps=2, curves=(LOSS,), ending="cut_off", precision="bf16", lost=1)
    assert outline_sections.run_line(cut) == (
        "steps 0 to 2 (2 steps logged), bf16, loss 3 to 1.5, ended without a final record (killed or crashed), "
        "1 line lost"
    )
    lost = replace(RUN, axis=HealthAxis(first=(0, 7, 9), last=(6, 8, 10)), curves=(replace(LOSS, middle=(3.0, None)),))
    assert outline_sections.run_line(lost).endswith("loss 3 to 3, then not finite since step 7")
    never = replace(lost, curves=(replace(LOSS, middle=(None, None), nonfinite=(1, 2)),))
    assert outline_sections.run_line(never).endswith(", loss not finite since step 0")
    assert outline_sections.run_line(replace(RUN, ending="ended", exit_code=3)).endswith("ended with exit code 3")
    assert outline_sections.health_title(replace(RUN, optimizer="critic")) == "run small, optimizer critic (logs/small)"
    assert outline_sections.health_title(replace(RUN, optimizer="optimizer2")) == "run small, optimizer2 (logs/small)"


def test_a_scaler_in_two_lines():
    scaler = ScalerHistory(path=PATH, growths=0, backoffs=1, growth_tracker=7, arguments=USED)
    first, second = facts(scalers=(scaler,))
    assert (
        first[1] == "loss scale 65536 at first, 32768 at least, 65536 at most, 32768 in the end; 0 growths, 1 backoff"
    )
    assert "growth_interval=2000; 7 steps since it changed" in second[1]


def test_marks_are_told_the_last_of_many():
    marks = tuple(CheckpointMark(step=at, path=f"c{at}", health="good") for at in range(20))
    ((label, said),) = facts(checkpoints=marks)
    assert (label, said[:10], said[-19:]) == ("checkpoints", "12 before,", "c19 (step 19, good)")
    ((label, said),) = facts(actions=(ActionMark(step=4, action="skip", reason="a spike"),))
    assert (label, said) == ("done", "skip at step 4: a spike")


def test_markdown_has_the_run_and_its_command_and_no_markup_of_a_name():
    look = LookMark(step=2, verdict="sick", says="An op overflows.", bundle="b", command="ampdoctor bisect-nan b")
    run = replace(RUN, name="<b>&", curves=(LOSS,), looks=(look,), skipped=1, skip_share=0.5)
    text = render_markdown(Report(command="health", target={}, verdict="healthy", health=HealthSection(runs=(run,))))
    assert "\nrun `<b>&` " in text  # a code span, in which nothing is markup
    assert "- **skipped**: 1 step (50.00%)" in text
    assert "- **not finite**: the loss of 2 steps" in text
    assert "```console\nampdoctor bisect-nan b\n```" in text


@pytest.mark.parametrize("first", ["data", "both", "hardware"])
def test_what_moved_first_is_a_line_of_its_own_in_every_form(first):
    where, evidence = Where(step=1, phase="loss", file=RUN.source), {"first": first, "usual": 2.0}
    jump = Finding(
        code="AMP720", name="gradient-jump", severity="warning", message="Up.", where=where, evidence=evidence
    )
    report = Report(command="health", target={}, verdict="healthy", findings=(jump,), health=HealthSection(runs=(RUN,)))
    canvas = RenderOptions(width=100, stream=None, color="never")
    for form in ("human", "markdown", "html"):
        text = renderer(form)(report, canvas)
        assert "what moved first: the " in text
        assert "<dt>first</dt>" not in text


def test_what_was_born_in_a_run_is_not_only_met_in_its_log():
    line = Source(file="train.py", line=14)
    born = Where(step=1, phase="forward", module="scores", file=RUN.source, nonfinite="inf", source=line)
    assert "first Inf here" in words.place(born)
    assert "Inf is there" in words.place(replace(born, source=None, phase="checkpoint"))
