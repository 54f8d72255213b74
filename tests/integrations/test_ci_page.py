"""docs/ci.md: its examples are of what there is."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import torch._dynamo  # noqa: F401 - a pytest run inside this one forgets what it loads, and torch loaded twice crashes
import yaml

import ampdoctor.integrations.pytest_guard  # noqa: F401 - as above

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def steps(node):
    """Every step of a workflow that uses the action."""
    if isinstance(node, dict):
        if str(node.get("uses", "")).startswith("OWNER/ampdoctor@"):
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from steps(part)


def test_the_action_is_used_with_inputs_and_outputs_that_it_has():
    used = [step for block in blocks("yaml") for step in steps(yaml.safe_load(block))]
    assert len(used) == 3
    for step in used:
        assert set(step["with"]) <= set(ACTION["inputs"])
    assert set(re.findall(r"steps\.scan\.outputs\.([\w-]+)", PAGE)) <= set(ACTION["outputs"])
    assert all(f"`{output}`" in PAGE for output in ACTION["outputs"])


def test_the_hooks_that_are_named_exist():
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}
    assert {f"ampdoctor-{name}" for name in re.findall(r"ampdoctor-(scan[\w-]*)", PAGE)} == hooks


def test_the_tests_of_the_page_fail_and_pass_as_it_says(pytester, monkeypatch, run_here):
    monkeypatch.setenv("COLUMNS", "160")
    pytester.makepyfile(test_training=next(block for block in blocks("python") if "amp_finite" in block))
    installed = bool(entry_points(group="pytest11", name="ampdoctor"))
    plugin = [] if installed else ["-p", "ampdoctor.integrations.pytest_plugin"]
    result = run_here(*plugin, "-p", "no:randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    shown = next(block for block in blocks("text") if block.startswith("ERROR  step 0"))
    assert " ".join(shown.split()) in " ".join(result.stdout.str().split())
