"""What the human report says of findings that were set aside and of a baseline."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from ampdoctor.evidence.report import Suppressed
from ampdoctor.reports.human import render_human
from tests.samples import OVERFLOW, SICK, UNDERFLOW

ASIDE = replace(
    SICK,
    findings=(),
    suppressed=(
        Suppressed(finding=OVERFLOW, by="baseline", reason="base.json"),
        Suppressed(finding=OVERFLOW, by="baseline", reason="base.json"),
        Suppressed(finding=UNDERFLOW, by="ignore", reason="the head is frozen [red]"),
    ),
)


def shown(report, **options):
    stream = io.StringIO()
    render_human(report, Console(file=stream, width=120), **options)
    return " ".join(stream.getvalue().split())


def test_how_many_are_set_aside_and_by_what_is_one_line_and_each_is_listed_when_asked():
    assert "3 findings set aside: 2 by the baseline base.json, 1 by an ignore" in shown(ASIDE)
    text = shown(ASIDE, verbose=1)
    assert "ignore: the head is frozen [red]" in text
    assert text.count("ERROR AMP201 forward-overflow") == 2
