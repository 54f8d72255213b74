"""What every test of a watched loop gets."""

from __future__ import annotations

import pytest

from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.watcher import TrainingWatcher


@pytest.fixture(autouse=True)
def every_report_follows_the_schema(monkeypatch, check_report):
    """Whatever a watch tells is held against the schema; a watch itself lets no error out."""
    reports, diagnosed = [], TrainingWatcher._diagnosed

    def noted(watcher, *said, **more):
        try:
            diagnosed(watcher, *said, **more)
        finally:
            reports.append(watcher.report)

    monkeypatch.setattr(TrainingWatcher, "_diagnosed", noted)
    yield
    for report in reports:
        check_report(render_json(report))
