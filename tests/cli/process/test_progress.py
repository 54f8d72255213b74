from __future__ import annotations

import io
import re

import pytest

from ampdoctor.cli.progress import ProgressLine


def lines(*calls, **options):
    """What stands on the line after each call, which is a time in seconds and what is said then."""
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    shown = []
    for at, *call in calls:
        now[0] = at
        line(*call, **options)
        shown.append(stream.getvalue().rpartition("\x1b[K")[2])
    return shown


def test_bytes_are_shown_as_a_bar_with_size_rate_and_time_left():
    calls = [(second, "layers.3.w", second * 500_000_000, 8_000_000_000) for second in range(5)]
    assert lines(*calls, unit="B")[-1] == "[#####...............]  2.00/8.00 GB  500.00 MB/s  12 s left  layers.3.w"


@pytest.mark.parametrize(
    ("total", "said"), [(4_000_000, "2.00/4.00 MB  500.00 kB/s"), (4_000, "2.00/4.00 kB  0.50 kB/s")]
)
def test_small_files_are_counted_in_small_units(total, said):
    calls = [(second, "w", second * total // 8, total) for second in range(5)]
    assert said in lines(*calls, unit="B")[-1]


def test_parts_are_counted():
    calls = [(2 * second, "replaying", second, 8) for second in range(4)]
    assert lines(*calls)[-1] == "[#######.............]  3/8  2.0 s each  10 s left  replaying"
    fast = [(second, "replaying", 3 * second, 60) for second in range(4)]
    assert lines(*fast)[-1] == "[###.................]  9/60  3.0/s  17 s left  replaying"


def test_nothing_is_promised_where_the_end_is_unknown():
    assert lines((0, "trying", 0, None), (5, "trying", 3, None))[-1] == "3  5 s  trying"
    assert lines((0, "waiting", 0, None), (5, "waiting", 0, None))[-1] == "5 s  waiting"


def test_a_rate_is_not_made_of_the_first_moment():
    assert "left" not in lines((0, "w", 0, 100), (1.5, "w", 3, 100))[-1]
    assert "left" in lines((0, "w", 0, 100), (2.5, "w", 3, 100))[-1]


def test_the_time_left_follows_what_was_lately():
    quick = [(second, "w", second * 10, 1000) for second in range(20)]
    slow = [(20 + second, "w", 200 + second, 1000) for second in range(60)]
    said = [int(re.search(r"(\d+) min", line)[1]) for line in lines(*quick, *slow) if " min " in line]
    assert said[-1] >= 11  # about 740 parts, one a second; all of the work counted alike would say 4
    jump = lines(*quick, (20, "w", 191, 1000))[-1]
    assert "1 min 2" in jump or "1 min 3" in jump  # one slow second does not turn 81 s into 800


def test_another_phase_begins_anew():
    first = [(second, "replaying", second, 8) for second in range(9)]
    then = lines(*first, (9, "comparing with fp32", 0, 8), (9.5, "comparing with fp32", 1, 8))
    assert then[-2] == "[....................]  0/8  comparing with fp32"
    assert then[-1] == "[##..................]  1/8  2.0/s  comparing with fp32"


def test_the_next_file_of_many_begins_anew():
    first = [(second, f"a: t{second}", second * 1_000_000_000, 8_000_000_000) for second in range(9)]
    then = lines(*first, (9, "b: t0", 0, 8_000_000_000), unit="B")
    assert then[-1] == "[....................]  0.00/8.00 GB  b: t0"


@pytest.mark.parametrize(("seconds", "said"), [(59, "59 s left"), (61, "1 min 01 s left"), (7300, "2 h 01 min left")])
def test_long_times_are_readable(seconds, said):
    total = seconds + 10
    assert said in lines((0, "w", 0, total), (10, "w", 10, total))[-1]


def test_work_that_is_soon_over_shows_nothing():
    assert lines((0.2, "w", 1, 8), (0.9, "w", 8, 8)) == ["", ""]


def test_a_line_is_never_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = lines((0, "層" * 50, 1, 8), (2, "層" * 50, 2, 8))[-1]
    assert sum(2 if character == "層" else 1 for character in shown) <= 39


def test_a_name_cannot_steer_the_terminal():
    assert "\x1b" not in lines((0, "w", 1, 8), (2, "w\x1b[2J", 1, 8), unit="B")[-1]
    assert "\\x1b[2J" in lines((0, "w", 1, 8), (2, "w\x1b[2J", 1, 8), unit="B")[-1]


def test_it_is_erased_at_the_end():
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    line.clear()
    assert stream.getvalue() == ""
    now[0] = 2.0
    line("w", 1, 8)
    line.clear()
    assert stream.getvalue().endswith("\r\x1b[K")
