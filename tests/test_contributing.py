"""CONTRIBUTING's worked example of a rule is followed to the letter in a copy of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^`([^`]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)


def section(title):
    """Return a section of CONTRIBUTING; a heading inside a block of code ends none."""
    lines, found, fenced = [], False, False
    for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            found = line == f"## {title}"
        lines += [line] if found else []
    return "\n".join(lines)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the example's files in it."""
    copy = tmp_path_factory.mktemp("project")
    for folder in ("ampdoctor", "docs", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    files = FILE.findall(section("A new rule"))
    assert len(files) == 3
    for path, content in files:
        assert not (copy / path).exists()
        (copy / path).write_text(content, encoding="utf-8")
    return copy


def run(project, command):
    """Run a command line in the copy, with this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, shell=True, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_new_rule_is_its_file_its_page_and_its_test(project):
    outputs = [run(project, command) for command in COMMAND.findall(section("A new rule"))]
    assert [done.returncode for done in outputs] == [0, 0, 0], "".join(done.stdout + done.stderr for done in outputs)
    assert outputs[2].stdout.startswith("AMP113 double-precision: Weights in float64, which autocast does not cast\n")
    assert "AMP113.share = 0.5 (share, 0 to 1)" in outputs[2].stdout
    save_file({"fc.weight": np.ones((4, 4)) + np.arange(4.0)}, project / "sick.safetensors")
    save_file({"fc.weight": np.ones((4, 4), "f4") + np.arange(4, dtype="f4")}, project / "healthy.safetensors")
    scanned = run(project, "python -m ampdoctor scan sick.safetensors healthy.safetensors --format json")
    codes = [(f["code"], Path(f["where"]["file"]).name) for f in json.loads(scanned.stdout)["findings"]]
    assert codes == [("AMP113", "sick.safetensors")]
