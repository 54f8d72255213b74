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
    result = smallest_set(range(n), lab, **options)
    assert result.elements == tuple(sorted(needed))
    assert result.minimal
    assert [tried for tried, _ in result.trials] == lab.asked
    return len(lab.asked)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_place_of_up_to_three_within_the_bound(n, k):
    for needed in itertools.combinations(range(n), k):
        assert check(n, needed) <= trials_bound(n, k)


@pytest.mark.parametrize("n", [23, 32, 33, 48, 63, 64])
def test_many_places_of_up_to_three_among_many(n):
    places = [*itertools.combinations(range(n), 1), *itertools.combinations(range(n), 2)]
    places += [tuple(random.Random(n + i).sample(range(n), 3)) for i in range(200)]
    for needed in random.Random(n).sample(places, 250):
        assert check(n, needed) <= trials_bound(n, len(needed))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_set_of_any_size(data):
    n = data.draw(st.integers(1, 64))
    needed = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n))
    assert check(n, needed) <= trials_bound(n, len(needed))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_neighbours_that_fail_together(data):
    n = data.draw(st.integers(2, 64))
    k = data.draw(st.integers(1, min(n, 8)))
    start = data.draw(st.integers(0, n - k))
    assert check(n, range(start, start + k)) <= trials_bound(n, k)


@pytest.mark.parametrize("n", [8, 64])
def test_a_likely_element_is_tried_by_itself_and_saves_the_search(n):
    assert check(n, [5], given=[5]) == 1
    for other in (0, 4, 7):
        assert check(n, [5, other], given=[5]) <= trials_bound(n, 2)
    for needed in ([3], [3, 6], [0, 1, 2]):
        assert check(n, needed, given=[5]) <= trials_bound(n, len(needed)) + 1, "not needed: dropped again"


def test_large_orders_stay_logarithmic():
    generator = random.Random(0)
    for k in (1, 2, 3):
        needed = generator.sample(range(3000), k)
        assert check(3000, needed) <= trials_bound(3000, k)


@pytest.mark.parametrize(("n", "k", "most"), [(30, 2, 14), (100, 3, 27), (300, 5, 50)])
def test_with_one_right_guess_few_trials_are_needed(n, k, most):
    draws = [random.Random(seed).sample(range(n), k) for seed in range(30)]
    assert sum(check(n, needed, given=needed[:1]) for needed in draws) / 30 <= most


def test_where_everything_treated_does_not_cure_there_is_no_set():
    asked = []
    assert smallest_set(range(9), lambda treated: bool(asked.append(treated))) is None
    assert asked == [frozenset(range(9))] * 1


def test_nothing_to_treat():
    assert smallest_set([], lambda _: True) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_elements_that_act_on_each_other_still_give_a_set_that_cures_and_is_1_minimal(data):
    n = data.draw(st.integers(1, 9))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    table = {frozenset(c): rng.random() < 0.4 for k in range(1, n + 1) for c in itertools.combinations(range(n), k)}
    table[frozenset(range(n))] = True
    result = smallest_set(range(n), table.__getitem__)
    chosen = frozenset(result.elements)
    assert table[chosen]
    assert chosen in dict(result.trials), "its cure was tried, not inferred"
    assert result.minimal


def test_two_that_may_stand_for_each_other():
    result = smallest_set(range(8), lambda treated: 2 in treated or 6 in treated)
    assert result.elements in ((2,), (6,))


def test_the_limit_gives_what_cured_so_far():
    lab = Lab({3, 17, 40, 50})
    result = smallest_set(range(64), lab, limit=9)
    assert len(lab.asked) == 9
    assert lab.needed <= set(result.elements)
    assert len(result.elements) < 64
