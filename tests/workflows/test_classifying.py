"""What a recommendation says and what a search for other causes adds to it."""

from __future__ import annotations

import pytest

from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.where import Where
from ampdoctor.workflows.classifying import combined


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


def test_another_cause_is_told_beside_the_scale():
    own, other = said("AMP301", "error", "grad_underflow"), said("AMP501", "error", "optimizer_precision")
    assert {f.code for f in combined([own], [other, DEPARTS])} == {"AMP301", "AMP501"}
