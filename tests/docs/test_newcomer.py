"""The newcomer's three commands (docs/howto/watch-a-training.md), in an environment with torch and nothing of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks

PAGE = DOCS / "howto" / "watch-a-training.md"


@pytest.mark.slow
def test_from_pip_install_to_the_page(tmp_path):
    """What pip would have to download for minutes, torch above all, is there already; the package itself is built."""
    shown = blocks(PAGE.read_text(encoding="utf-8"))
    three = [line.removeprefix("$ ") for line in shown[0].text.splitlines()]
    assert len(three) == 3
    (script,) = (block.text for block in shown if block.mark == "file: train.py")

    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)  # pip is one of the others, and installs where its Python is
    inside = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))
    (inside / "torch_and_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    copy = tmp_path / "ampdoctor"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    for folder in ("ampdoctor", "docs/rules"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "train.py").write_text(script.replace("range(150)", "range(20)"))

    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    env["PATH"] = os.pathsep.join([str(environment / "bin"), env.get("PATH", os.defpath)])
    for command in three:
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    home = subprocess.run(
        [environment / "bin" / "python", "-c", "import ampdoctor; print(ampdoctor.__file__)"],
        env=env,
        cwd=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(environment) in home, f"it was not installed there, but found in {home}, beside {sys.prefix}"
    page = (tmp_path / "watched.html").read_text(encoding="utf-8")
    assert "watched" in page
    assert len(page) > 100_000
