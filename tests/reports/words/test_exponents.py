from __future__ import annotations

import pytest
import torch

from ampdoctor.numerics.counting import count
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.reports.console import ASCII, BINADES, FIRST, LAST, UNICODE, WINDOWS, Axis, fitting


def bars(*magnitudes, **options):
    axis = Axis(binades=options.pop("binades", 1))
    return axis.bars(count(torch.tensor(magnitudes)).to_dict(), **options)


@pytest.mark.parametrize("name", WINDOWS)
def test_the_windows_are_those_of_the_formats(name):
    flush, end = WINDOWS[name]
    assert 2.0**flush == FORMATS[name].flush_at
    assert 2.0 ** (end - 1) < FORMATS[name].max < 2.0**end


def test_a_magnitude_stands_at_its_exponent():
    shown = bars(1.5 * 2.0**-20)
    assert shown.index("█") == -20 - FIRST
    assert shown.strip() == "█"
    assert len(shown) == LAST - FIRST


def test_what_the_axis_does_not_reach_stands_at_its_end():
    assert bars(2.0**-60 * 1.5)[0] == "█"
    assert bars(2.0**30 * 1.5)[-1] == "█"


def test_a_hand_made_scale_is_taken_out():
    assert bars(1.5 * 2.0**-10, shift=10).index("█") == -20 - FIRST


def test_more_is_higher():
    levels = [UNICODE.levels.index(c) for c in bars(*[1.5] * 1000, *[3.0] * 10, 6.0).strip()]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] == 7
    assert levels[-1] >= 0


def test_values_beyond_the_window_are_not_below_it():
    """What fp16 flushes at a scale lies left of its window, to the column."""
    axis = Axis(binades=1)
    window = axis.window("fp16", shift=4)
    assert bars(1.01 * 2.0**-29).index("█") == window.index("├")
    assert bars(0.99 * 2.0**-29).index("█") < window.index("├")
    assert bars(65504.0 / 16).index("█") == window.index("┤")


@pytest.mark.parametrize("binades", BINADES)
def test_every_axis_is_whole(binades):
    axis = Axis(binades=binades)
    assert axis.columns * binades == LAST - FIRST
    assert len(axis.scale()) == axis.columns
    assert axis.scale().startswith("2^-44")
    assert axis.scale().endswith("2^16")
    for name in WINDOWS:
        assert len(axis.window(name)) <= axis.columns


def test_a_window_that_goes_on_has_arrows():
    assert Axis(binades=3).window("bf16") == "◄───────bf16───────►"
    assert Axis(binades=3).window("fp16") == "      ├────fp16────┤"
    assert Axis(binades=3).window("fp16", shift=24) == "◄───fp16───┤"
    assert Axis(binades=3, glyphs=ASCII).window("fp16") == "      |----fp16----|"


def test_a_window_beyond_the_axis_is_not_drawn():
    assert Axis(binades=1).window("e5m2", shift=100) == ""
    assert Axis(binades=1).window("e5m2", shift=-100) == ""


def test_the_finest_axis_that_fits_is_taken():
    assert fitting(80, UNICODE).binades == 1
    assert fitting(38, UNICODE).binades == 2
    assert fitting(20, UNICODE).binades == 3
    assert fitting(10, UNICODE).binades == 6
    assert fitting(9, UNICODE) is None


def test_ascii_stays_ascii():
    axis = Axis(binades=2, glyphs=ASCII)
    drawn = axis.bars(count(torch.rand(1000)).to_dict()) + "".join(axis.window(name) for name in WINDOWS)
    assert drawn.isascii()
