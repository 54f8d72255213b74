"""Completion: the protocol as bash, zsh and fish speak it, and a real bash; never with torch."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

COMMANDS = ["run", "scan", "health", "bisect-nan", "profile", "recommend", "plan", "merge", "rule", "env"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ampdoctor ", COMMANDS),
        ("ampdoctor sc", ["scan"]),
        ("ampdoctor scan --fo", ["--format"]),
        ("ampdoctor scan --format js", ["json", "jsonl"]),
    ],
)
def test_bash_is_offered_commands_options_and_choices(words, offered, typed):
    word = len(words.split()) if words.endswith(" ") else len(words.split()) - 1
    env = {"COMP_WORDS": words, "COMP_CWORD": str(word), "_AMPDOCTOR_COMPLETE": "complete_bash"}
    result = typed(env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == offered


def test_zsh_and_fish_are_offered_the_same(typed):
    asked = {"_TYPER_COMPLETE_ARGS": "ampdoctor scan --format js", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for shell in ("zsh", "fish"):
        shown = typed(env={**asked, "_AMPDOCTOR_COMPLETE": f"complete_{shell}"}).stdout
        assert "json" in shown
        assert "jsonl" in shown
        assert "sarif" not in shown


ASK = """
source "$HOME/.bashrc"
COMP_WORDS=(ampdoctor scan --fail); COMP_CWORD=2
_ampdoctor_completion ampdoctor
printf '%s\\n' "${COMPREPLY[@]}"
complete -p ampdoctor
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_what_is_installed_into_bash_completes(run_cli, tmp_path):
    """It is a real process: Typer asks for its parents to know the shell."""
    command = tmp_path / "bin" / "ampdoctor"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ampdoctor "$@"\n')
    command.chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}

    def in_bash(script):
        return run_cli("--norc", "-c", script, command=("bash",), env=env)

    assert in_bash("ampdoctor --install-completion; exit $?").returncode == 0
    offered, told = in_bash(ASK).stdout.splitlines()
    assert (offered, told) == ("--fail-on", "complete -o default -F _ampdoctor_completion ampdoctor")
