"""What is said of a checkpoint beside an earlier one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, TensorChange, UpdateReach

LOST = UpdateReach(learning_rate=1e-5, changed_by_one=0.02, changed_by_many=0.98, steps=1000, rms=1e-5)
LANDS = replace(LOST, changed_by_one=0.9)
STILL = TensorChange(
    name="fc.weight",
    role="weight",
    entry="weight",
    module="fc",
    group="",
    file="new.pt",
    shape=(10, 10),
    dtype="bfloat16",
    old_dtype="bfloat16",
    elements=100,
    unchanged=97,
    change_norm=1e-4,
    old_norm=1.0,
    amax=0.5,
    old_amax=0.5,
    nonfinite=0,
    old_nonfinite=0,
    moments=True,
    pure_half=True,
    reach=LOST,
)
MOVED = replace(STILL, name="head.weight", unchanged=3, reach=None, change_norm=0.1)
NORM = replace(STILL, name="norm.weight", shape=(10,), elements=10, unchanged=10)


def change(*tensors, **fields):
    known = {"old": "a.pt", "new": "b.pt", "old_step": 100, "new_step": 300, "reshaped": {}} | fields
    return CheckpointChange(tensors=tensors, **known)


def said(*tensors, **fields):
    return [(f.code, f.severity) for f in judge(change(*tensors, **fields))]


@pytest.mark.parametrize(
    ("tensors", "severity"),
    [
        ([STILL], "error"),
        ([STILL, replace(MOVED, elements=90)], "error"),
        ([STILL, replace(MOVED, elements=200)], "warning"),
        ([NORM, MOVED], "note"),
    ],
)
def test_lost_updates_are_as_bad_as_the_share_of_the_model_that_they_hit(tensors, severity):
    assert said(*tensors) == [("AMP712", severity)]


@pytest.mark.parametrize(
    "tensor",
    [
        MOVED,
        replace(STILL, unchanged=70),
        replace(STILL, reach=LANDS),
        replace(
            STILL, reach=replace(LOST, changed_by_many=0.1, changed_by_one=0.0)
        ),  # a rate that means to move nothing
        replace(STILL, reach=None),  # an optimizer whose rule is not known
        replace(STILL, pure_half=False),  # fp32 moments: there are fp32 weights as well
        replace(STILL, moments=False, reach=None),  # frozen
    ],
)
def test_what_moves_or_is_not_meant_to_is_left_alone(tensor):
    assert said(tensor, MOVED) == []


WIDE = replace(STILL, dtype="float32", old_dtype="float32", pure_half=False, unchanged=100, reach=LANDS)
FROZEN = replace(WIDE, moments=False, reach=None)
REST = [STILL, replace(STILL, unchanged=100, reach=LANDS)]


@pytest.mark.parametrize(
    ("tensors", "fields", "findings"),
    [
        ([WIDE, MOVED], {}, [("AMP713", "warning")]),
        ([FROZEN, MOVED], {}, []),
        ([FROZEN], {}, [("AMP713", "note")]),
        ([replace(WIDE, old_dtype="bfloat16", reach=None, nonfinite=100)], {}, [("AMP714", "note")]),  # NaN, no rest
        (REST, {"old_step": None}, []),  # without steps in between nothing stands still
        (REST, {"new_step": 100}, []),
    ],
)
def test_weights_that_did_not_change_at_all(tensors, fields, findings):
    assert said(*tensors, **fields) == findings


def test_growth_between_two():
    grown = replace(MOVED, dtype="float32", old_dtype="float32", pure_half=False, old_amax=2.0**8, amax=2.0**12)
    (finding,) = judge(change(grown))
    assert (finding.code, finding.severity) == ("AMP710", "warning")
    assert finding.evidence["meets_at"] == pytest.approx(500.0, abs=0.1)
    assert said(replace(grown, role="buffer"))[0] == ("AMP710", "note")
    assert said(replace(grown, amax=2.0**11)) == []
    assert said(replace(grown, old_amax=1.0)) == []  # out of its initialisation


def test_another_structure_is_a_note_that_names_the_first():
    fields = {"appeared": ("new.weight",), "vanished": ("a", "b"), "reshaped": {"c": ((2,), (3,))}}
    retyped = replace(MOVED, old_dtype="float32")
    (finding,) = judge(change(retyped, **fields))
    assert (finding.code, finding.severity) == ("AMP714", "note")
    assert "2 are gone (a first); 1 is new (new.weight)" in finding.message
    assert finding.evidence["retyped"] == {"head.weight": ("float32", "bfloat16")}
    assert finding.evidence["reshaped"] == {"c": [[2], [3]]}
