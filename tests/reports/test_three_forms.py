"""Console, Markdown and HTML say the same; `tests/corpus/test_corpus.py` asks it of real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.reports.read_json import report_from_dict
from tests.browser.pages import EVERY_VIEW
from tests.reports.every_field import every_field
from tests.reports.full_sample import full
from tests.reports.three_forms import FORMS, seen, unclear, unsaid
from tests.samples import EVERY, OVERFLOW, SICK

REPORTS = {**EVERY, **EVERY_VIEW, "full": full(), "every field": report_from_dict(every_field())}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REPORTS)
def test_every_text_of_the_outline_is_in_the_form(name, form):
    assert unsaid(REPORTS[name], form) == []


@pytest.mark.parametrize("form", FORMS)
def test_what_a_form_lacks_is_seen(form, monkeypatch):
    there = seen(form, SICK)
    other = replace(SICK, findings=(replace(SICK.findings[0], help="Ask the oracle."), *SICK.findings[1:]))
    monkeypatch.setattr("tests.reports.three_forms.seen", lambda *_: there)
    assert unsaid(other, form) == ["Ask the oracle."]


def test_what_is_not_plain_is_seen():
    assert unclear(SICK) == []
    long = replace(OVERFLOW, where=replace(OVERFLOW.where, module="aten." * 30), message="word " * 100)
    assert len(unclear(replace(SICK, findings=(long,)))) == 2
