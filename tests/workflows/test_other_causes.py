"""What a recommendation says and what a search for other causes adds to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.workflows.recommend import combined


def said(code, severity="warning", cause=None):
    where = Where(step=0, phase="backward")
    return Finding(code=code, name="x", severity=severity, cause=cause, where=where, message="x", evidence={})


DEPARTS = said("AMP207")


@pytest.mark.parametrize("severity", ["error", "warning"])
@pytest.mark.parametrize(("code", "cause"), [("AMP301", "grad_underflow"), ("AMP405", "grad_overflow")])
def test_gradients_that_the_scale_harms_are_not_unexplained_as_well(code, cause, severity):
    own = said(code, severity, cause)
    assert combined([own], [DEPARTS]) == (own,)


@pytest.mark.parametrize("own", [[], [said("AMP301", "note", "grad_underflow")], [said("AMP402")]])
def test_gradients_that_no_harm_of_the_scale_explains_stay_a_warning(own):
    assert DEPARTS in combined(own, [DEPARTS])


def cured(finding, kind, value, status="verified"):
    return replace(finding, prescription=Prescription(kind=kind, value=value, status=status, detail="x"))


def test_another_cause_is_told_beside_a_scale_that_cures():
    own = cured(said("AMP301", "error", "grad_underflow"), "init_scale", 8.0)
    other = said("AMP501", "error", "optimizer_precision")
    assert {f.code for f in combined([own], [other, DEPARTS])} == {"AMP301", "AMP501"}


@pytest.mark.parametrize(
    ("kind", "value", "status"), [("init_scale", 8.0, "not_run"), ("dtype", "bfloat16", "verified")]
)
def test_a_scale_that_cured_nothing_gives_way_to_a_cause_that_was_found(kind, value, status):
    own = cured(said("AMP301", "error", "grad_underflow"), kind, value, status)
    other = said("AMP201", "error", "forward_overflow")
    assert combined([own], [other]) == (other,)
    assert combined([own], []) == (own,)
