"""Lines of user code, as a report shows them."""

from __future__ import annotations

import os
from pathlib import Path

from ampdoctor.evidence.where import Source
from ampdoctor.probes.ops.source import applied_line, as_source, shown_from, user_line


def test_names_are_relative_to_where_the_replay_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "pkg" / "train.py", tmp_path.parent / "other.py"
    with shown_from(Path.cwd()):
        os.chdir(tmp_path.parent)
        assert as_source((str(inside), 7)) == Source("pkg/train.py", 7)
        assert as_source(("pkg/train.py", 7)) == Source("pkg/train.py", 7)
        assert as_source((str(outside), 1)) == Source(outside.as_posix(), 1)
    assert as_source((str(outside), 1)) == Source("other.py", 1)
    assert as_source(None) is None


def test_an_installed_package_is_named_from_site_packages():
    assert as_source(("/x/lib/site-packages/pkg/a.py", 3)) == Source("pkg/a.py", 3)


def test_the_innermost_line_of_the_user():
    name, number = user_line()
    assert name == __file__
    assert number > 1
    assert applied_line() is None
