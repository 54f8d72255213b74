"""`make` on machines that are not ready: one sentence that says what to do. Nothing is installed here."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def fake_python(tmp_path):
    """Return a function that writes an interpreter which is ours, but for what one line of shell does first."""

    def write(line):
        path = tmp_path / "fake-python"
        path.write_text(f'#!/bin/sh\n{line}\nexec "{sys.executable}" "$@"\n')
        path.chmod(0o755)
        return str(path)

    return write


def make(run_cli, checkout, *arguments):
    return run_cli(*arguments, command=("make",), cwd=checkout)


def test_a_python_without_ensurepip_names_the_package(run_cli, checkout, fake_python):
    python = fake_python('case "$*" in *ensurepip*) exit 1;; esac')
    result = make(run_cli, checkout, "test", f"PYTHON={python}")
    assert result.returncode == 2
    assert f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in result.stderr
    assert not (checkout / ".venv").exists()


def test_help_lists_every_target(run_cli, checkout):
    text = make(run_cli, checkout).stdout
    targets = "demo test browser gpu-check bench bench-diagnosis bench-recommend peers layouts docs".split()
    for target in (*targets, "lint", "format", "types", "clean"):
        assert f"make {target} " in text


def test_the_tests_that_a_target_names_exist(run_cli):
    text = make(run_cli, ROOT, "-n", "scalers", "sinks", "browser").stdout
    named = set(re.findall(r"\btests/[\w/]+(?:\.\w+)?", text))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.xdist_group("kept")
def test_what_is_made_once_for_several_tests_is_made_in_one_process(request):
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@kept"), "this pytest-xdist keeps no group together under this pytest"
