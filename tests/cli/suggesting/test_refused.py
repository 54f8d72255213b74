"""A refused command line is one sentence and a code, and Typer's own suggestion where it has one."""

from __future__ import annotations

import shlex

import pytest

from ampdoctor.cli.main import main

REFUSED = {
    "modle.pt": "No such command 'modle.pt'",
    "scan x --jobs 2": "--jobs is a knob: --threshold jobs=VALUE, or jobs in the configuration file",
    "profile x --half-products plain": "--half-products is a knob: --threshold half-products=VALUE",
    "scan x --tau 0.1": "No such option: --tau",
    "--format json scan model.pt": "No such option: --format",
    "scan nothing.pt": "nothing.pt does not exist",
    "scan model.pt --fail-onn error": "No such option: --fail-onn (Possible options: --fail-on",
    "scan model.pt --format yaml": "'yaml' is not one of",
    "scan": "Missing argument 'PATH'",
    "scan x y --list": "--list takes one PATH",
    "scan x --report json": "the form is FORMAT=FILE",
    "scan x --output no/such/folder/report.txt": "its folder does not exist",
    "bisect-nan f --steps 0": "--steps",
    "bisect-nan f --device tpu": "tpu",
    "bisect-nan f --arg x": "the form is KEY=JSON",
    "bisect-nan f --arg x=abc": "a string needs quotes",
    "bisect-nan f --arg x=1 --arg x=2": "--arg x: given twice",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_a_refused_command_line_is_a_sentence(typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(typed)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ampdoctor: error: ")
    assert REFUSED[typed] in said.err.splitlines()[0]
    assert "Traceback" not in said.err
    assert "internal error" not in said.err
    assert "Value error" not in said.err, "a word of the library behind the command line"


def test_without_a_word_it_is_the_help_on_stderr(capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("Usage: ampdoctor")) == ("", True)
