"""What a user may move, and what is refused with which words."""

from __future__ import annotations

import math

import pytest

from ampdoctor.diagnosis.catalogue import all_thresholds, thresholds_from
from ampdoctor.diagnosis.health.loss_rules import LEAST_ZEROS
from ampdoctor.diagnosis.scan.weights import SATURATED_8_BIT
from ampdoctor.errors import UsageError
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, ERROR_BAD, HORIZON, MovedThreshold


def test_what_is_not_moved_has_its_default():
    moved = thresholds_from({"AMP107": {"saturated": 0.1}})
    assert moved[SATURATED_8_BIT] == 0.1
    assert {key for key, one in all_thresholds().items() if moved[one] != one.default} == {"AMP107.saturated"}
    assert all(DEFAULT_THRESHOLDS[one] == one.default for one in all_thresholds().values())
    assert thresholds_from() == thresholds_from({}, {"AMP107": {}}) == DEFAULT_THRESHOLDS


def test_a_later_layer_wins_and_leaves_the_rest_of_the_earlier_ones():
    file = {"AMP107": {"saturated": 0.1}, "AMP702": {"entries": 5}}
    flags = {"AMP107": {"saturated": 0.2}, "AMP301": {"error_bad": 0.3}}
    moved = thresholds_from(file, flags)
    assert (moved[SATURATED_8_BIT], moved[LEAST_ZEROS], moved[ERROR_BAD]) == (0.2, 5, 0.3)
    assert [one.key for one, _ in moved.moved] == ["AMP107.saturated", "AMP301.error_bad", "AMP702.entries"]


def test_what_was_moved_is_listed_for_a_report():
    assert thresholds_from({"AMP702": {"entries": 5.0}}).listed() == (
        MovedThreshold(code="AMP702", name="entries", value=5, default=3, unit="entries"),
    )
    assert DEFAULT_THRESHOLDS.listed() == ()


def test_whole_numbers_stay_whole():
    moved = thresholds_from({"AMP707": {"horizon": 500.0}})  # its code in earlier versions
    assert (moved.horizon, type(moved.horizon), type(moved[HORIZON])) == (500, int, int)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"amp107": {"saturated": 0.1}}, "amp107 is no rule with a threshold that can be moved; did you mean AMP107?"),
        ({"AMP101": {"count": 2}}, "AMP101 is no rule with a threshold that can be moved; `ampdoctor rule CODE` shows"),
        ({"AMP105": {"eraced": 0.1}}, "AMP105 has no threshold 'eraced'; it has relative_error (default "),
        ({"AMP107": {"saturated": 1.1}}, "AMP107.saturated is 1.1, not between 0 and 1 (share)"),
        ({"AMP107": {"saturated": math.nan}}, "AMP107.saturated is nan, not between"),
        ({"AMP107": {"saturated": "0.1"}}, "AMP107.saturated is '0.1', which is no number"),
        ({"AMP107": {"saturated": True}}, "AMP107.saturated is True, which is no number"),
        ({"AMP702": {"entries": 2.5}}, "AMP702.entries is 2.5, not a whole number (entries)"),
        ({"AMP301": {"error_warning": 0.5}}, "AMP301.error_bad is 0.1, below AMP301.error_warning, which is 0.5: they"),
    ],
)
def test_what_is_refused_says_what_is_there(values, words):
    with pytest.raises(UsageError) as refused:
        thresholds_from(values)
    assert words in str(refused.value)


def test_values_of_several_layers_are_held_against_one_another_only_together():
    moved = thresholds_from({"AMP301": {"error_warning": 0.5}}, {"AMP301": {"error_bad": 0.6}})
    assert moved[ERROR_BAD] == 0.6
