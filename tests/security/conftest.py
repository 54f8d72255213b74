from __future__ import annotations

import json
from pathlib import Path

import pytest

from ampdoctor.cli.main import main

WATCHED = Path(__file__).with_name("watched.py")


@pytest.fixture
def watched(python, run_cli, tmp_path):
    """Return a function that scans contents, by name, in one limited process, and returns what each took."""

    def watch(contents):
        for name, content in contents.items():
            if content is not None:
                (tmp_path / name).write_bytes(content)
        paths = [str(tmp_path / name) for name in contents]
        result = run_cli(command=(python, str(WATCHED), *paths))
        assert result.returncode == 0, result.stderr
        return dict(zip(contents, map(json.loads, result.stdout.splitlines()), strict=True))

    return watch


@pytest.fixture
def run_in_process(capsys):
    """Return a function that runs a command line here, and returns its code and what it wrote."""

    def run(*arguments):
        code = main(arguments)
        written = capsys.readouterr()
        return code, written.out, written.err

    return run
