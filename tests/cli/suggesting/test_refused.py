"""A refused command line is one sentence and a code, and Typer's own suggestion where it has one."""

from __future__ import annotations

import shlex

import pytest

from ampdoctor.cli.main import main

REFUSED = {
    "modle.pt": "No such command 'modle.pt'",
    "scn model.pt": "No such command 'scn'",
    "-h": "No such option",
    "--format json scan model.pt": "No such option: --format",
    "scan nothing.pt": "nothing.pt does not exist",
    "scan model.pt --fail-onn error": "No such option: --fail-onn (Possible options: --fail-on",
    "scan model.pt --format yaml": "'yaml' is not one of",
    "profile train.py:make_run --steps many": "--steps",
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
