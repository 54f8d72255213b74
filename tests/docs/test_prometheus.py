"""The rules and the dashboard under docs/prometheus speak of what the OpenMetrics sink writes, and of nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ampdoctor.health.sinks.export import KINDS
from ampdoctor.health.sinks.metrics import METRICS, PREFIX
from ampdoctor.health.sinks.to_openmetrics import FAMILIES

FOLDER = Path(__file__).parents[2] / "docs" / "prometheus"
NAME = re.compile(rf"\b{PREFIX}_[a-z0-9_]+")
SAMPLES = {
    f"{PREFIX}_{metric.name}{suffix}"
    for metric in FAMILIES
    for suffix in (("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",))
} | {f"{PREFIX}_run_info"}


def expressions_of_the_rules():
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def dashboard():
    return json.loads((FOLDER / "dashboard.json").read_text())


def expressions_of_the_dashboard():
    board = dashboard()
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])
    yield from (note["expr"] for note in board["annotations"]["list"])
    yield from (variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query")


def test_every_name_is_one_that_is_written():
    for expression in (*expressions_of_the_rules().values(), *expressions_of_the_dashboard()):
        names = set(NAME.findall(expression))
        assert names, expression
        assert names <= SAMPLES, expression


@pytest.mark.parametrize("check", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool(check):
    tool = shutil.which("promtool")
    if tool is None:
        assert os.environ.get("AMPDOCTOR_SINKS") != "required"
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run([tool, *check], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_is_tested_where_it_speaks():
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    spoke = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert spoke == set(expressions_of_the_rules())


def test_the_page_lists_every_metric():
    rows = [
        f"| `{metric.name}{'/' + metric.label.upper() if metric.label else ''}` | {metric.help} |"
        for metric in METRICS.values()
    ]
    page = (FOLDER.parent / "howto" / "export.md").read_text()
    assert "\n".join(rows) + "\n\n" in page
    assert all(f"`{kind.name}=" in page for kind in KINDS)
