"""Tracebacks without the watch's frames."""

from __future__ import annotations

import traceback
from types import FunctionType

import pytest

from ampdoctor.live.script import cut_our_frames
from ampdoctor.package import FOLDER

HOOK = str(FOLDER / "live" / "hook.py")


def from_file(file, source, **names):
    """Return the function `f` of a source that says it is from this file."""
    exec(compile(source, file, "exec"), names)
    assert isinstance(names["f"], FunctionType)
    return names["f"]


def cut(call):
    with pytest.raises(BaseException) as caught:
        call()
    cut_our_frames(caught.value)
    return caught.value


def files(error):
    return [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)]


def test_frames_between_two_of_the_script_go():
    fails = from_file("model.py", "def f():\n    1 / 0\n")
    hook = from_file(HOOK, "def f():\n    return call()\n", call=fails)
    script = from_file("train.py", "def f():\n    hook()\n", hook=hook)
    assert files(cut(script))[-2:] == ["train.py", "model.py"]


def test_what_ampdoctor_raises_where_the_script_has_called_it_stays():
    ours = from_file(HOOK, "def f():\n    raise TypeError\n")
    script = from_file("train.py", "def f():\n    ours()\n", ours=ours)
    assert files(cut(script))[-2:] == ["train.py", "hook.py"]


def test_it_is_the_same_for_what_it_came_of_and_what_it_holds():
    fails = from_file("model.py", "def f():\n    1 / 0\n")
    hook = from_file(HOOK, "def f():\n    call()\n", call=fails)
    tries = "def f():\n    try:\n        hook()\n    except ZeroDivisionError as error:\n"
    source = tries + "        raise group('g', [error]) from error\n"
    error = cut(from_file("train.py", source, hook=hook, group=ExceptionGroup))
    error.__cause__.__context__ = error  # a circle
    cut_our_frames(error)
    assert files(error)[-1:] == ["train.py"]
    assert files(error.__cause__) == files(error.exceptions[0]) == ["train.py", "model.py"]


def test_the_import_machinery_around_a_loader_of_ours_goes_with_it():
    fails = from_file("torch.py", "def f():\n    raise OSError\n")
    loader = from_file(HOOK, "def f():\n    call()\n", call=fails)
    machinery = from_file("<frozen importlib._bootstrap>", "def f():\n    call()\n", call=loader)
    assert files(cut(from_file("train.py", "def f():\n    call()\n", call=machinery)))[-2:] == ["train.py", "torch.py"]
