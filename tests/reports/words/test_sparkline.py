from __future__ import annotations

import math

import pytest

from ampdoctor.reports.text import sparkline


def test_levels_go_from_the_lowest_to_the_highest():
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0], 8) == "▁▁"
    assert sparkline([1.0, None, 3.0], 8) == "▁ █"


def test_ratios_are_equal_on_a_logarithmic_line():
    powers = [2.0**exponent for exponent in range(8)]
    assert sparkline(powers, 8, logarithmic=True) == "▁▂▃▄▅▆▇█"
    assert sparkline(powers, 8)[:4] == "▁▁▁▁"
    assert sparkline([0.0, -1.0, 1.0, 2.0], 8, logarithmic=True) == "▁▁▁█"


def test_one_overflow_among_a_thousand_steps_is_seen():
    values = [1.0] * 1000
    values[500] = math.inf
    line = sparkline(values, 10)
    assert len(line) == 10
    assert line.count("\N{MULTIPLICATION SIGN}") == 1


@pytest.mark.parametrize("count", [1, 3, 7, 100, 4096])
def test_it_has_a_character_for_each_value_up_to_the_width(count):
    assert len(sparkline([1.0 * at for at in range(count)], 60)) == min(count, 60)


def test_nothing_is_nothing():
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 0) == ""
    assert sparkline([None, None], 5) == "  "
