"""Completion: the protocol as bash, zsh and fish speak it, and a real bash; never with torch."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from ampdoctor.diagnosis.catalogue import all_thresholds, rules
from ampdoctor.evidence.targets import TARGETS

COMMANDS = ["run", "scan", "health", "bisect-nan", "profile", "recommend", "plan", "merge", "rule", "env"]
COMPLETED = [
    ("ampdoctor ", COMMANDS),
    ("ampdoctor sc", ["scan"]),
    ("ampdoctor scan --fo", ["--format"]),
    ("ampdoctor scan --format js", ["json", "jsonl"]),
    ("ampdoctor scan model.pt --report js", ["json=", "jsonl="]),
    ("ampdoctor scan model.pt --threshold AMP10", [f"{key}=" for key in all_thresholds() if key.startswith("AMP10")]),
    ("ampdoctor recommend run.py:make --target ", list(TARGETS)),
    ("ampdoctor bisect-nan run.py:make --precision f", ["fp32", "fp16"]),
    ("ampdoctor rule AMP20", [code for code in rules() if code.startswith("AMP20")]),
    ("ampdoctor rule amp201", ["amp201"]),
    ("ampdoctor rule forward-o", ["forward-overflow"]),
]


@pytest.mark.parametrize(("typed", "offered"), COMPLETED)
def test_bash_is_offered_commands_options_choices_and_codes(typed, offered, run_cli):
    words = typed.split()
    word = len(words) if typed.endswith(" ") else len(words) - 1
    env = {"COMP_WORDS": typed, "COMP_CWORD": str(word), "_AMPDOCTOR_COMPLETE": "complete_bash"}
    result = run_cli(env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == offered


def offered_by_zsh(typed, run_cli):
    shown = run_cli(env={"_TYPER_COMPLETE_ARGS": typed, "_AMPDOCTOR_COMPLETE": "complete_zsh"}).stdout
    offers = [line.partition('":')[0].strip('"') for line in shown.partition("((")[2].splitlines()]
    return [*offers[:-1], offers[-1].removesuffix("\"))'")]  # the last one ends the list, where it says no more


def offered_by_fish(typed, run_cli):
    asked = {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    shown = run_cli(env={**asked, "_AMPDOCTOR_COMPLETE": "complete_fish"}).stdout
    return [line.partition("\t")[0] for line in shown.splitlines()]


@pytest.mark.each_value_once(of=lambda shell, typed, offered: {shell, typed})
@pytest.mark.parametrize("shell", [offered_by_zsh, offered_by_fish], ids=["zsh", "fish"])
@pytest.mark.parametrize(("typed", "offered"), COMPLETED)
def test_zsh_and_fish_are_offered_the_same(shell, typed, offered, run_cli):
    assert shell(typed, run_cli) == offered


@pytest.mark.parametrize("words", [{}, {"COMP_WORDS": "ampdoctor scan", "COMP_CWORD": "two"}])
def test_asked_without_words_it_is_a_sentence(words, run_cli):
    result = run_cli("scan", "x", env={"_AMPDOCTOR_COMPLETE": "complete_bash", **words})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ampdoctor: error: _AMPDOCTOR_COMPLETE asks for completions")


def test_for_a_path_the_shells_complete_files_themselves(run_cli):
    env = {"COMP_WORDS": "ampdoctor scan mod", "COMP_CWORD": "2", "_AMPDOCTOR_COMPLETE": "complete_bash"}
    assert run_cli(env=env).stdout.strip() == ""  # bash then does what `-o default` says
    zsh = run_cli(env={"_TYPER_COMPLETE_ARGS": "ampdoctor scan mod", "_AMPDOCTOR_COMPLETE": "complete_zsh"})
    assert zsh.stdout.strip() == "_files"


@pytest.fixture
def home(tmp_path):
    """A home of its own with an `ampdoctor` on the path, and checkpoints in the working directory.

    It is a real process: Typer asks for its parents to know the shell.
    """
    command = tmp_path / "bin" / "ampdoctor"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ampdoctor "$@"\n')
    command.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.safetensors").touch()
    return tmp_path


def in_bash(run_cli, home, script):
    env = {"HOME": str(home), "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return run_cli("--norc", "-c", script, command=("bash",), env=env, cwd=home / "work")


ASK = """
source "$HOME/.bashrc"
COMP_WORDS=({words}); COMP_CWORD={word}
_ampdoctor_completion ampdoctor
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_what_is_installed_into_bash_completes(run_cli, home):
    installed = in_bash(run_cli, home, "ampdoctor --install-completion; exit $?")
    assert installed.returncode == 0, installed.stderr
    assert "completion installed" in installed.stdout
    for words, word, offered in (("ampdoctor s", 1, ["scan"]), ("ampdoctor scan --fail", 2, ["--fail-on"])):
        assert in_bash(run_cli, home, ASK.format(words=words, word=word)).stdout.split() == offered
    told = in_bash(run_cli, home, 'source "$HOME/.bashrc"; complete -p ampdoctor').stdout.strip()
    assert told == "complete -o default -F _ampdoctor_completion ampdoctor"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_can_be_shown_instead(run_cli, home):
    shown = in_bash(run_cli, home, "ampdoctor --show-completion; exit $?")
    assert shown.returncode == 0
    assert "complete -o default -F _ampdoctor_completion ampdoctor" in shown.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell, run_cli):
    result = run_cli(env={"_AMPDOCTOR_COMPLETE": f"source_{shell}"})
    assert result.returncode == 0
    assert f"_AMPDOCTOR_COMPLETE=complete_{shell}" in result.stdout


WITHOUT = """
import sys
from ampdoctor.cli.main import main
code = main()
sys.exit(3 if {heavy} & {{name.partition(".")[0] for name in sys.modules}} else code)
"""


@pytest.mark.parametrize(("heavy", "code"), [({"torch", "numpy"}, 0), ({"typer"}, 3)])
def test_completion_does_not_import_torch(heavy, code, run_cli):
    env = {"COMP_WORDS": "ampdoctor rule AMP", "COMP_CWORD": "2", "_AMPDOCTOR_COMPLETE": "complete_bash"}
    result = run_cli(command=(sys.executable, "-c", WITHOUT.format(heavy=heavy)), env=env)
    assert result.returncode == code
    assert "AMP201" in result.stdout
