"""Pieces that should fill a tensor, against counting every element."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.checkpoints.dcp import MAX_COMPARISONS, TilingBudget, misfit
from ampdoctor.errors import LimitExceededError


@st.composite
def filled(draw):
    """Draw a shape, and boxes that fill it: cut again and again at any place."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        at, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[d]))
        left = (*sizes[:d], cut, *sizes[d + 1 :])
        right = (*sizes[:d], sizes[d] - cut, *sizes[d + 1 :])
        boxes += [(at, left), ((*at[:d], at[d] + cut, *at[d + 1 :]), right)]
    return shape, draw(st.permutations(boxes))


@st.composite
def anything(draw):
    shape, boxes = draw(filled())
    boxes = list(boxes)
    for _ in range(draw(st.integers(0, 2))):
        n = draw(st.integers(0, len(boxes) - 1))
        at, sizes = boxes[n]
        moved = tuple(a + draw(st.integers(-1, 1)) for a in at)
        boxes[n] = moved, tuple(max(s + draw(st.integers(-1, 1)), 0) for s in sizes)
    return shape, boxes


def counted(shape, boxes):
    """Return how often each element is covered, and whether a box lies outside."""
    often = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    outside = False
    for at, sizes in boxes:
        outside |= any(a < 0 or a + n > size for a, n, size in zip(at, sizes, shape, strict=True))
        for place in itertools.product(*(range(a, a + n) for a, n in zip(at, sizes, strict=True))):
            if place in often:
                often[place] += 1
    return often, outside


@given(anything())
def test_the_answer_is_that_of_counting(case):
    shape, boxes = case
    often, outside = counted(shape, boxes)
    fits = not outside and set(often.values()) == {1}
    assert (misfit(shape, boxes, "w", TilingBudget()) is None) == fits


def test_words():
    assert misfit((4,), [((0,), (3,))], "w", TilingBudget()) == "its pieces leave a hole"
    assert misfit((4,), [((0,), (3,)), ((2,), (2,))], "w", TilingBudget()) == "its pieces overlap"
    assert misfit((4,), [((0,), (2,)), ((1,), (2,))], "w", TilingBudget()) == "its pieces overlap and leave a hole"
    assert misfit((4,), [((2,), (3,))], "w", TilingBudget()) == "a piece lies outside it"
    assert misfit((4,), [((0, 0), (4, 1))], "w", TilingBudget()) == "a piece lies outside it"
    assert misfit((0, 3), [], "w", TilingBudget()) is None


def test_few_pieces_of_many_dimensions_ask_for_bounded_work():
    shape = (*(2,) * 21, 42)
    boxes = [((0,) * 22, (*(1 if d == n else 2 for d in range(21)), 4)) for n in range(21)]
    assert sum(map(math.prod, (sizes for _, sizes in boxes))) == math.prod(shape)
    with pytest.raises(LimitExceededError, match="comparisons"):
        misfit(shape, boxes, "w", TilingBudget())


def test_the_comparisons_of_all_tensors_are_bounded_together():
    boxes = [((n,), (1,)) for n in range(1000)]
    budget = TilingBudget()
    assert misfit((1000,), boxes, "w", budget) is None
    assert MAX_COMPARISONS - budget.left == 2000
    budget.left = 1000
    with pytest.raises(LimitExceededError, match="comparisons"):
        misfit((1000,), boxes, "w", budget)
