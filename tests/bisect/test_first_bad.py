from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.workflows.searches import first_bad


def ask(before, answers, limit=None):
    """The result, and the positions that were asked, in order."""
    asked = []

    def bad(position):
        asked.append(position)
        return answers(position)

    found = first_bad(before, bad, limit=limit)
    assert len(set(asked)) == len(asked) == found.asked
    assert len(before) - 1 not in asked
    assert found.bad in found.suspects
    return found, asked


def in_order(n):
    """A plain order of n positions, each of which hands on to the next."""
    return [(1 << position) - 1 for position in range(n)]


def bound(n):
    return math.ceil(math.log2(n))


@pytest.mark.parametrize("n", range(1, 100))
def test_in_a_plain_order_each_first_bad_position_is_found_within_the_bound(n):
    for first in range(n):
        found, asked = ask(in_order(n), lambda position, first=first: position >= first)
        assert (found.suspects, found.bad) == ((first,), first)
        assert len(asked) <= bound(n)


@pytest.mark.parametrize("n", range(2, 100))
def test_one_position_more_than_the_questions_allow_leaves_at_most_two_suspects(n):
    for first in range(n + 1):
        found, _ = ask(in_order(n + 1), lambda position, first=first: position >= first, limit=bound(n))
        assert first in found.suspects
        assert len(found.suspects) <= 2


@given(st.integers(1, 2000), st.data())
def test_long_orders(n, data):
    first = data.draw(st.integers(0, n - 1))
    found, asked = ask(in_order(n), lambda position: position >= first)
    assert found.suspects == (first,)
    assert len(asked) <= bound(n)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_where_the_premise_fails_the_answer_is_still_an_edge(answers):
    n = len(answers)
    found, asked = ask(in_order(n), answers.__getitem__)
    (position,) = found.suspects
    assert len(asked) <= bound(n)
    assert position == n - 1 or answers[position]
    assert position == 0 or not answers[position - 1]


@st.composite
def graphs(draw):
    """`before` of a random graph whose last position comes from all others."""
    n = draw(st.integers(1, 40))
    before = []
    for position in range(n):
        parents = draw(st.sets(st.integers(0, position - 1), max_size=3)) if position else set()
        mask = 0
        for parent in parents:
            mask |= before[parent] | 1 << parent
        before.append(mask)
    before[-1] = (1 << (n - 1)) - 1
    return before


@given(graphs(), st.data())
def test_a_culprit_in_a_branch_is_found(before, data):
    culprit = data.draw(st.integers(0, len(before) - 1))
    found, _ = ask(before, lambda position: position == culprit or bool(before[position] >> culprit & 1))
    assert found.suspects == (culprit,)


@given(graphs(), st.data(), st.integers(0, 8))
def test_with_fewer_questions_the_culprit_stays_among_the_suspects(before, data, limit):
    culprit = data.draw(st.integers(0, len(before) - 1))
    found, asked = ask(before, lambda p: p == culprit or bool(before[p] >> culprit & 1), limit)
    assert culprit in found.suspects
    assert len(asked) <= limit


def test_an_empty_order_is_refused():
    with pytest.raises(ValueError, match="no last one"):
        first_bad([], lambda position: True)
