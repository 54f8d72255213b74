"""What is said instead of a refusal: the ways in; paths as they were typed."""

from __future__ import annotations

import pytest

from ampdoctor.cli.main import main


@pytest.mark.parametrize("command", ["bisect-nan", "profile"])
def test_a_command_without_a_target_says_what_can_be_replayed(command, capsys):
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert f"ampdoctor {command} train.py -- --its arguments" in said
    assert ("--until-sick" in said) == (command == "bisect-nan")


def test_a_notebook_is_to_be_made_a_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run.ipynb").write_text("{}")
    assert main(["bisect-nan", "my run.ipynb"]) == 2
    assert "jupyter nbconvert --to script 'my run.ipynb'" in capsys.readouterr().err


def test_another_mistake_is_not_answered_with_all_ways_in(capsys):
    assert main(["bisect-nan", "--stepz", "3", "loop.py"]) == 2
    assert "What can be replayed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("weights/short.safetensors", "weights/short.safetensors is truncated: "),
        ("weights/none.pt", "weights/none.pt does not exist.\n"),
    ],
)
def test_the_error_names_the_path_as_it_was_typed(typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "short.safetensors").write_bytes((1000).to_bytes(8, "little") + b'{"a": ')
    assert main(["scan", typed]) == 2
    assert capsys.readouterr().err.startswith(f"ampdoctor: error: {said}")
