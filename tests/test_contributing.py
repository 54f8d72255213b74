"""The worked examples of CONTRIBUTING.md, followed literally in a copy of the package."""

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
import torch
from safetensors.torch import save_file

from tests.test_architecture import violations

ROOT = Path(__file__).parents[1]
STEP = re.compile(r"(?ms)`(?P<file>[\w/.]+)`:\n(?P<blocks>(?:\n```(?:python|diff|markdown)\n.*?^```\n)+)")
BLOCK = re.compile(r"(?ms)^```(python|diff|markdown)\n(.*?)^```$")
COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "_build")
OF_THE_COPY = (sys.executable, "-m", "ampdoctor")
"""Imports the package that lies in the working folder."""
SAMPLE = {"fc.weight": [[1.0, np.nan], [2.0, 3.0]], "fc.bias": [0.0, 1.0]}


@pytest.fixture
def copy(tmp_path):
    """A copy of the package with its pages, in a folder that it can be run from."""
    for folder in ("ampdoctor", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=LEFT_OUT)
    return tmp_path


def section_of(title):
    """Return a section of CONTRIBUTING.md; a heading inside a block of code ends none."""
    lines, found, fenced = [], False, False
    for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            found = line == f"## {title}\n"
        lines += [line] if found else []
    return "".join(lines)


def follow(section, copy):
    """Do what a section of CONTRIBUTING.md says; returns the files that it takes."""
    steps = [(step["file"], BLOCK.findall(step["blocks"])) for step in STEP.finditer(section_of(section))]
    for file, blocks in steps:
        for kind, block in blocks:
            (change if kind == "diff" else write)(copy / file, block)
    assert violations(copy / "ampdoctor") == []
    return [file for file, _ in steps]


def write(file, text):
    assert not file.exists()
    file.write_text(text, encoding="utf-8")


def change(file, block):
    lines = block.splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
    there = file.read_text(encoding="utf-8")
    assert there.count(before) == 1
    file.write_text(there.replace(before, after), encoding="utf-8")


@pytest.mark.slow
def test_a_new_rule_is_its_file_its_page_and_its_test(copy, run_cli):
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=LEFT_OUT)
    shutil.copy(ROOT / "pyproject.toml", copy)
    files = follow("A new rule", copy)
    assert [file.rpartition("/")[2] for file in files] == [
        "double_precision.py",
        "AMP113.md",
        "test_double_precision.py",
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in COMMAND.findall(section_of("A new rule")):
        done = subprocess.run(
            command, shell=True, cwd=copy, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("AMP113 double-precision: Weights in float64, which autocast does not cast\n")
    assert "AMP113.share = 0.5 (share, 0 to 1)" in done.stdout
    save_file({"fc.weight": torch.arange(16.0).reshape(4, 4).double()}, copy / "sick.safetensors")
    save_file({"fc.weight": torch.arange(16.0).reshape(4, 4)}, copy / "healthy.safetensors")
    asked = ("scan", "sick.safetensors", "healthy.safetensors", "--format", "json")
    report = json.loads(run_cli(*asked, command=OF_THE_COPY, cwd=copy, env={"PYTHONPATH": ""}).stdout)
    assert [(f["code"], Path(f["where"]["file"]).name) for f in report["findings"]] == [("AMP113", "sick.safetensors")]


@pytest.mark.slow
def test_a_new_layout_is_one_file_and_its_line(copy, run_cli):
    (copy / "sample").mkdir()
    for name, values in SAMPLE.items():
        np.save(copy / "sample" / f"{name}.npy", np.array(values, dtype=np.float32))
    files = follow("A new layout", copy)
    assert files == ["ampdoctor/checkpoints/npy_folder.py", "ampdoctor/checkpoints/folder.py"]
    result = run_cli("scan", "sample", "--format", "json", command=OF_THE_COPY, cwd=copy, env={"PYTHONPATH": ""})
    report = json.loads(result.stdout)
    assert (result.returncode, report["target"]["format"], report["target"]["tensors"]) == (1, "npy-folder", 2)
    found = [(finding["code"], finding["where"]["tensor"], finding["where"]["file"]) for finding in report["findings"]]
    assert found == [("AMP101", "fc.weight", "fc.weight.npy")]


@pytest.mark.slow
def test_a_new_format_is_one_file_and_its_line(copy, run_cli):
    tensors = {name: torch.tensor(values) for name, values in SAMPLE.items()}
    save_file(tensors, copy / "sample.safetensors")
    files = follow("A new format", copy)
    assert files == ["ampdoctor/reports/brief.py", "ampdoctor/reports/formats.py"]
    asked = ("scan", "sample.safetensors", "--format", "brief")
    result = run_cli(*asked, command=OF_THE_COPY, cwd=copy, env={"PYTHONPATH": ""})
    assert (result.returncode, result.stdout) == (1, "error AMP101 fc.weight\n")
