"""The pre-commit hooks, run by pre-commit itself on a scratch repository; nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

pytest.importorskip("pre_commit", reason="pip install -e '.[test]' brings pre-commit")
ROOT = Path(__file__).parents[2]
HOOKS = ROOT / ".pre-commit-hooks.yaml"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture
def repository(tmp_path, python):
    """Return a function that runs something in a scratch repository whose config names the hooks of this checkout."""
    place, hooks, programs = tmp_path / "scratch", tmp_path / "hooks", tmp_path / "bin"
    for folder in (place, hooks, programs):
        folder.mkdir()
    program = programs / "ampdoctor"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{python}" -m ampdoctor "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(tmp_path / "home"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        **{f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "COLUMNS": "200",
    }

    def run(*command, cwd=place):
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=120)

    shutil.copy(HOOKS, hooks)
    for folder in (hooks, place):
        assert run("git", "init", "-q", "-b", "main", cwd=folder).returncode == 0
    run("git", "add", ".", cwd=hooks)
    assert run("git", "commit", "-q", "-m", "hooks", cwd=hooks).returncode == 0
    revision = run("git", "rev-parse", "HEAD", cwd=hooks).stdout.strip()
    config = {"repos": [{"repo": str(hooks), "rev": revision, "hooks": [{"id": "ampdoctor-scan-system"}]}]}
    (place / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run.place = place
    return run


def checked(repository, files):
    for name, content in files.items():
        path = repository.place / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save_file({"fc.weight": content}, path)
    repository("git", "add", ".")
    return repository(sys.executable, "-m", "pre_commit", "run", "--all-files", "--color", "never")


def test_a_committed_checkpoint_of_a_library_is_healthy_with_all_its_files(repository):
    shutil.copytree(ROOT / "fixtures" / "checkpoints" / "accelerate_bin", repository.place / "accelerate_bin")
    result = checked(repository, {})
    assert result.returncode == 0, result.stdout


SICK = torch.tensor([[1.0, float("nan")], [1.0, 1.0]])


HEALTHY = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        ({"good.safetensors": HEALTHY, "big.pt": POINTER}, 0, ["Passed"]),
        ({"good.safetensors": HEALTHY, "bad.safetensors": SICK}, 1, ["- exit code: 1", "AMP101", "bad.safetensors"]),
        ({"good.safetensors": HEALTHY, "cut.safetensors": b"cut off"}, 1, ["- exit code: 2"]),
        ({"--list.safetensors": HEALTHY, "a b $(touch x).safetensors": SICK}, 1, ["a b $(touch x).safetensors"]),
    ],
)
def test_what_is_committed_is_scanned_and_what_is_sick_or_unreadable_is_stopped(repository, files, code, said):
    result = checked(repository, files)
    assert result.returncode == code
    assert [words for words in said if words not in result.stdout] == []
    assert "AMP101" not in said or "good.safetensors" not in result.stdout
    assert not (repository.place / "x").exists()


def test_the_commit_itself_is_stopped(repository):
    assert repository(sys.executable, "-m", "pre_commit", "install").returncode == 0
    checked(repository, {"bad.safetensors": SICK})
    stopped = repository("git", "commit", "-m", "weights")
    assert stopped.returncode != 0
    assert "AMP101" in stopped.stdout + stopped.stderr


def test_both_hooks_are_one_but_for_where_ampdoctor_comes_from(run_cli):
    own, system = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))
    assert (own["language"], system["language"]) == ("python", "system")
    assert {own["id"], system["id"]} == {"ampdoctor-scan", "ampdoctor-scan-system"}
    apart = {"id", "name", "description", "language"}
    assert {k: v for k, v in own.items() if k not in apart} == {k: v for k, v in system.items() if k not in apart}
    program, command, *options = own["entry"].split()
    assert program == "ampdoctor"
    help_text = run_cli(command, "--help").stdout
    assert all(option in help_text for option in options)


@pytest.mark.parametrize("hook", yaml.safe_load(HOOKS.read_text(encoding="utf-8")), ids=lambda hook: hook["id"])
def test_of_bin_files_only_those_named_like_checkpoints_are_scanned(hook):
    taken = ("pytorch_model.bin", "a/pytorch_model-00001-of-00002.bin", "a/optimizer.bin", "adapter_model.bin", "b.pt")
    left = ("tokenizer.bin", "data/train.bin", "model.bin.txt", "a/my_table.bin")
    assert [name for name in (*taken, *left) if re.search(hook["files"], name)] == list(taken)
