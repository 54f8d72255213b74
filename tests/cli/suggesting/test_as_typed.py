"""Errors about a path name it as it was typed."""

from __future__ import annotations

import pytest

from ampdoctor.cli.main import main


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("weights/short.safetensors", "weights/short.safetensors is truncated: "),
        ("weights/none.pt", "weights/none.pt does not exist.\n"),
        (
            "weights/*.pt",
            "weights/*.pt does not exist: the shell has found no file that this pattern matches.\n",
        ),
        (
            "https://example.org/x/model.pt",
            "https://example.org/x/model.pt is a URL, and none is fetched: download the file and name that.\n",
        ),
    ],
)
def test_the_error_names_the_path_as_it_was_typed(typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "short.safetensors").write_bytes((1000).to_bytes(8, "little") + b'{"a": ')
    assert main(["scan", typed]) == 2
    assert capsys.readouterr().err.startswith(f"ampdoctor: error: {said}")
