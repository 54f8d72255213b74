"""What the human report says of findings that were set aside and of a baseline."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ampdoctor.evidence.report import BaselineSection, Suppressed
from ampdoctor.reports.html_report import render_html
from ampdoctor.reports.human import render_human
from ampdoctor.reports.markdown import render_markdown
from tests.samples import FIXED, HEALTHY, OVERFLOW, SICK, UNDERFLOW

ASIDE = replace(
    SICK,
    findings=(),
    suppressed=(
        Suppressed(finding=OVERFLOW, by="baseline", reason="base.json"),
        Suppressed(finding=OVERFLOW, by="baseline", reason="base.json"),
        Suppressed(finding=UNDERFLOW, by="ignore", reason="the head is frozen [red]"),
    ),
)


def shown(report, **options):
    stream = io.StringIO()
    render_human(report, Console(file=stream, width=120), **options)
    return " ".join(stream.getvalue().split())


def test_how_many_are_set_aside_and_by_what_is_one_line():
    assert "3 findings set aside: 2 by the baseline base.json, 1 by an ignore" in shown(ASIDE)


def test_each_is_listed_with_its_reason_when_asked():
    text = shown(ASIDE, verbose=1)
    assert "ignore: the head is frozen [red]" in text
    assert text.count("ERROR AMP201 forward-overflow") == 2


FORMS = {
    "human": lambda report: shown(report, verbose=1),
    "markdown": lambda report: render_markdown(report).replace("`", ""),
    "html": render_html,
}


PLACE = "tail.weight (optimizer_state:exp_avg) in b.pt"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_fixed_has_its_name_in_every_form_for_people(form):
    tensors = [replace(FIXED, tensor=name, op="state:weight") for name in ("head.weight", "stem.weight")]
    of_several = replace(FIXED, tensor="tail.weight", op="optimizer_state:exp_avg", file="b.pt")
    fixed = (*tensors, of_several, replace(FIXED, tensor=None, module="body.fc", op="aten.linear"))
    baseline = BaselineSection(file="base.json", written=False, new=0, known=0, fixed=fixed)
    text = FORMS[form](replace(HEALTHY, baseline=baseline))
    for name in ("head.weight", "stem.weight", "body.fc (aten.linear)", PLACE):
        assert name in text
    assert "head.weight" not in FORMS[form](replace(HEALTHY, baseline=replace(baseline, fixed=())))
