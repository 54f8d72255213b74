"""What every test of a watched loop gets."""

from __future__ import annotations

import pytest

from ampdoctor.live.op_watch import LiveJudge
from ampdoctor.reports.json_report import render_json


@pytest.fixture(autouse=True)
def every_report_follows_the_schema(monkeypatch, check_report):
    """Whatever a watch tells is held against the schema before anybody else hears of it."""
    tell = LiveJudge._tell

    def checked(judge, *said):
        on_sick = judge.on_sick

        def hears(report):
            assert check_report(render_json(report))["command"] == "watch"
            on_sick(report)

        judge.on_sick = hears
        tell(judge, *said)

    monkeypatch.setattr(LiveJudge, "_tell", checked)
