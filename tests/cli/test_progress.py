from __future__ import annotations

import io

from ampdoctor.cli.progress import ProgressLine


def shown(*calls, **options) -> str:
    """What stands on the line after calls at two seconds and later."""
    stream, now = io.StringIO(), [0.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    for at, call in enumerate(calls):
        now[0] = 2.0 + at
        line(*call, **options)
    return stream.getvalue().rpartition("\x1b[K")[2]


def test_bytes_are_shown_as_a_bar_with_size_and_rate():
    assert shown(("layers.3.w", 2_000_000_000, 8_000_000_000), unit="B") == (
        "[#####...............] 2.00/8.00 GB, 1.00 GB/s  layers.3.w"
    )
    assert shown(("w", 1, 8), ("v", 8, 8), unit="B").startswith("[####################] ")


def test_other_work_is_counted():
    assert shown(("step", 3, 8)) == "step 3/8 (2 s)"
    assert shown(("step", 3, None)) == "step 3 (2 s)"


def test_a_name_cannot_steer_the_terminal():
    assert "\x1b" not in shown(("w\x1b[2J", 1, 8), unit="B")
