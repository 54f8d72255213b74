from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.bisect.first_bad import FirstBad, first_bad


def ask(n, answers):
    """The result, and the positions that were asked, in order."""
    asked = []

    def bad(position):
        asked.append(position)
        return answers(position)

    return first_bad(n, bad), asked


def bound(n):
    return math.ceil(math.log2(n))


@pytest.mark.parametrize("n", range(1, 130))
def test_each_first_bad_position_is_found_within_the_bound(n):
    for first in range(n):
        found, asked = ask(n, lambda position, first=first: position >= first)
        assert found == FirstBad(position=first, asked=len(asked))
        assert len(asked) <= bound(n)


@given(st.integers(1, 10**9), st.data())
def test_long_orders(n, data):
    first = data.draw(st.integers(0, n - 1))
    found, asked = ask(n, lambda position: position >= first)
    assert found.position == first
    assert len(asked) <= bound(n)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_where_the_premise_fails_the_answer_is_still_an_edge(answers):
    n = len(answers)
    found, asked = ask(n, answers.__getitem__)
    assert len(asked) == len(set(asked)) <= bound(n)
    assert n - 1 not in asked
    assert found.position == n - 1 or answers[found.position]
    assert found.position == 0 or not answers[found.position - 1]


@pytest.mark.parametrize("n", [0, -1])
def test_an_empty_order_is_refused(n):
    with pytest.raises(ValueError, match="no last one"):
        first_bad(n, lambda position: True)
