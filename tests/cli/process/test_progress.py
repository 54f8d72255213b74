from __future__ import annotations

import io
import re

from ampdoctor.cli.process import ProgressLine

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n")


def lines(*calls, **options):
    """Return what each call writes, without control codes; a call is a time in seconds and the arguments."""
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    shown = []
    for at, *call in calls:
        now[0] = at
        before = stream.tell()
        line(*call, **options)
        shown.append(CONTROL.sub("", stream.getvalue()[before:]).rstrip())
    return shown


def test_bytes_are_shown_with_size_rate_and_time_left():
    calls = [(second, "layers.3.w", second * 500_000_000, 8_000_000_000) for second in range(5)]
    assert re.search(r"2\.0/8\.0 GB 500\.0 MB/s 0:00:1[0-9] layers\.3\.w$", lines(*calls, unit="B")[-1])


def test_parts_are_counted():
    calls = [(2 * second, "replaying", second, 8) for second in range(4)]
    assert re.search(r" 3/8 0:00:1[0-9] replaying$", lines(*calls)[-1])


def test_a_line_is_never_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    now[0] = 2.0
    line("層" * 50, 2, 8)
    assert "\n" not in stream.getvalue()
    for shown in filter(None, re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\r", stream.getvalue())):
        assert sum(2 if character == "層" else 1 for character in shown) <= 40


def test_a_name_cannot_steer_the_terminal():
    assert "\\x1b[2J" in lines((0, "w", 1, 8), (2, "w\x1b[2J", 1, 8), unit="B")[-1]


def test_it_is_erased_at_the_end():
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    line.clear()
    assert stream.getvalue() == ""
    now[0] = 2.0
    line("w", 1, 8)
    line.clear()
    assert "\x1b[2K" in stream.getvalue()[-20:]
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"
