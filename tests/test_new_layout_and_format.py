"""The worked examples of CONTRIBUTING.md, followed literally in a copy of the package."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.test_architecture import violations

ROOT = Path(__file__).parents[1]
STEP = re.compile(r"(?ms)`(?P<file>ampdoctor/[\w/.]+)`:\n(?P<blocks>(?:\n```(?:python|diff)\n.*?^```\n)+)")
BLOCK = re.compile(r"(?ms)^```(python|diff)\n(.*?)^```$")
OF_THE_COPY = (sys.executable, "-m", "ampdoctor")
"""Imports the package that lies in the working folder."""
SAMPLE = {"fc.weight": [[1.0, np.nan], [2.0, 3.0]], "fc.bias": [0.0, 1.0]}


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, in a folder that it can be run from."""
    shutil.copytree(ROOT / "ampdoctor", tmp_path / "ampdoctor", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def follow(section, copy):
    """Do what a section of CONTRIBUTING.md says; returns the files that it takes."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    steps = [(step["file"], BLOCK.findall(step["blocks"])) for step in STEP.finditer(text)]
    for file, blocks in steps:
        for kind, block in blocks:
            (write if kind == "python" else change)(copy / file, block)
    assert violations(copy / "ampdoctor") == []
    return [file for file, _ in steps]


def write(file, text):
    assert not file.exists()
    file.write_text(text, encoding="utf-8")


def change(file, block):
    lines = block.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] == " ")
    there = file.read_text(encoding="utf-8")
    assert there.count(before) == 1
    file.write_text(there.replace(before, "".join(line[1:] for line in lines)), encoding="utf-8")


def test_a_new_layout_is_one_file_and_its_line(copy, run_cli):
    (copy / "sample").mkdir()
    for name, values in SAMPLE.items():
        np.save(copy / "sample" / f"{name}.npy", np.array(values, dtype=np.float32))
    files = follow("A new layout", copy)
    assert files == ["ampdoctor/checkpoints/layouts/npy_folder.py", "ampdoctor/checkpoints/layouts/folder.py"]
    result = run_cli("scan", "sample", "--format", "json", command=OF_THE_COPY, cwd=copy, env={"PYTHONPATH": ""})
    report = json.loads(result.stdout)
    assert (result.returncode, report["target"]["format"], report["target"]["tensors"]) == (1, "npy-folder", 2)
    found = [(finding["code"], finding["where"]["tensor"], finding["where"]["file"]) for finding in report["findings"]]
    assert found == [("AMP101", "fc.weight", "fc.weight.npy")]


def test_a_new_format_is_one_file_and_its_line(copy, run_cli):
    tensors = {name: torch.tensor(values) for name, values in SAMPLE.items()}
    save_file(tensors, copy / "sample.safetensors")
    files = follow("A new format", copy)
    assert files == ["ampdoctor/reports/forms/to_brief.py", "ampdoctor/reports/forms/formats.py"]
    asked = ("scan", "sample.safetensors", "--format", "brief")
    result = run_cli(*asked, command=OF_THE_COPY, cwd=copy, env={"PYTHONPATH": ""})
    assert (result.returncode, result.stdout) == (1, "error AMP101 fc.weight\n")
