"""An import of the script's own is waited for, and looks as it would without."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from ampdoctor.hooks.interfaces import when_imported


def refused(error):
    raise AssertionError(error)


@pytest.fixture
def heavy(tmp_path, monkeypatch):
    """A module that nobody has imported yet."""
    (tmp_path / "heavy_module.py").write_text("import sys\nLOADER = __loader__, __spec__.loader\nDONE = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "heavy_module"
    sys.modules.pop("heavy_module", None)


def test_it_is_told_once_right_after_the_import(heavy):
    told = []
    before = list(sys.meta_path)
    with when_imported(heavy, lambda: told.append(sys.modules[heavy].DONE), refused):
        assert importlib.util.find_spec(heavy).origin.endswith("heavy_module.py")  # which many ask, and import nothing
        assert told == []
        module = importlib.import_module(heavy)
        assert told == [True]
        assert sys.meta_path == before
        importlib.reload(module)
    assert told == [True]
    assert {type(loader).__name__ for loader in (*module.LOADER, module.__loader__, module.__spec__.loader)} == {
        "SourceFileLoader"
    }


def test_it_waits_no_longer_than_the_block(heavy):
    told = []
    before = list(sys.meta_path)
    with when_imported(heavy, lambda: told.append(1), refused):
        pass
    importlib.import_module(heavy)
    assert (told, sys.meta_path) == ([], before)


def test_a_watch_that_cannot_begin_is_no_error_of_the_import_and_is_told(heavy):
    failed = []
    with when_imported(heavy, lambda: 1 / 0, failed.append):
        assert importlib.import_module(heavy).DONE
    assert [type(error) for error in failed] == [ZeroDivisionError]


def test_a_module_that_was_found_inside_and_is_run_afterwards_is_told_to_nobody(heavy):
    told = []
    with when_imported(heavy, lambda: told.append(1), refused):
        spec = importlib.util.find_spec(heavy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.DONE, told) == (True, [])
