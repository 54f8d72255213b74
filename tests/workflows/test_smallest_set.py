"""The smallest set: right for every place of the culprits, in few trials, none twice, and each element needed."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampdoctor.workflows.prescribe import smallest_set


def trials_bound(n, k):
    """Bounds the trials of QuickXplain for k needed elements among n, with those of everything and of the result."""
    return 2 * k * (math.log2(n / k) + 1) + 3


class Lab:
    """Cures where all needed elements are treated; counts, and refuses a second time."""

    def __init__(self, needed):
        self.needed = frozenset(needed)
        self.asked = []

    def __call__(self, treated):
        assert treated, "what is known to fail is not tried"
        assert treated not in self.asked, "no set is tried twice"
        self.asked.append(treated)
        return self.needed <= treated


def check(n, needed, **options):
    lab = Lab(needed)
    assert smallest_set(range(n), lab, **options) == (tuple(sorted(needed)), True)
    return len(lab.asked)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9, 12])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_place_of_up_to_three_within_the_bound(n, k):
    for needed in itertools.combinations(range(n), k):
        assert check(n, needed) <= trials_bound(n, k)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_set_of_any_size(data):
    n = data.draw(st.integers(1, 64))
    needed = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n))
    assert check(n, needed) <= trials_bound(n, len(needed))


@pytest.mark.parametrize("n", [8, 64])
def test_a_likely_element_is_tried_by_itself_and_saves_the_search(n):
    assert check(n, [5], given=[5]) == 1
    for other in (0, 4, 7):
        assert check(n, [5, other], given=[5]) <= trials_bound(n, 2)
    for needed in ([3], [3, 6], [0, 1, 2]):
        assert check(n, needed, given=[5]) <= trials_bound(n, len(needed)) + 1, "not needed: dropped again"


@pytest.mark.parametrize("elements", [range(9), []])
def test_where_everything_treated_does_not_cure_there_is_no_set(elements):
    assert smallest_set(elements, lambda treated: False) == ((), False)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_elements_that_act_on_each_other_still_give_a_set_that_cures_and_is_1_minimal(data):
    n = data.draw(st.integers(1, 9))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    table = {frozenset(c): rng.random() < 0.4 for k in range(1, n + 1) for c in itertools.combinations(range(n), k)}
    table[frozenset(range(n))] = True
    chosen, minimal = smallest_set(range(n), table.__getitem__)
    assert table[frozenset(chosen)]
    assert minimal


def test_the_limit_gives_what_cured_so_far():
    lab = Lab({3, 17, 40, 50})
    chosen, _ = smallest_set(range(64), lab, limit=9)
    assert len(lab.asked) == 9
    assert lab.needed <= set(chosen)
    assert len(chosen) < 64
