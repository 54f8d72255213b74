from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.errors import AmpdoctorError, FactoryError, ReplayError, UsageError, UserCodeError
from ampdoctor.replay.user_code import forget_working_folder, user_code


def test_prints_go_to_stderr_from_python_from_the_descriptor_and_from_a_child(capfd):
    print("before")  # noqa: T201 what is tested
    with user_code("train.py"):
        print("from python")  # noqa: T201
        os.write(1, b"from the descriptor\n")
        subprocess.run(["sh", "-c", "echo from a child"], check=True)
    print("after")  # noqa: T201
    out, err = capfd.readouterr()
    assert out == "before\nafter\n"
    assert {"from python", "from the descriptor", "from a child"} <= set(err.splitlines())


def test_everything_is_restored_after_an_exception():
    argv, stdout, path = sys.argv, sys.stdout, list(sys.path)

    def spoil():
        assert sys.path[0] == "/nowhere"
        sys.stdout = None
        raise ValueError

    with pytest.raises(UserCodeError), user_code("train.py", path=["/nowhere"]):
        spoil()
    assert (sys.argv, sys.stdout, sys.path) == (argv, stdout, path)


def raiser():
    def inner():
        raise ValueError("no such file\nsecond line")

    inner()


def test_an_exception_is_one_sentence_and_a_traceback_of_user_frames_only():
    with pytest.raises(UserCodeError) as caught, user_code("train.py", what="the loss"):
        raiser()
    assert str(caught.value) == "the loss raised ValueError: no such file"
    text = caught.value.traceback_text
    assert "in inner" in text
    assert "second line" in text
    assert "user_code.py" not in text.replace("test_user_code.py", "")
    assert "contextlib" not in text
    assert isinstance(caught.value.__cause__, ValueError)


def test_ctrl_c_passes():
    with pytest.raises(KeyboardInterrupt), user_code():
        raise KeyboardInterrupt


def test_our_own_errors_about_the_run_pass_unchanged():
    with pytest.raises(FactoryError, match=r"TrainingRun\(model=") as caught, user_code():
        TrainingRun(model=nn.Linear, batches=[], loss=len)
    assert not isinstance(caught.value, UserCodeError)


class OwnError(AmpdoctorError):
    exit_code = 0


@pytest.mark.parametrize("error", [FactoryError, ReplayError, UsageError, OwnError])
def test_errors_of_our_classes_that_user_code_raises_are_its_own(error):
    with pytest.raises(UserCodeError, match=f"the factory raised {error.__name__}: theirs") as caught, user_code():
        raise error("theirs")
    assert "test_user_code.py" in caught.value.traceback_text


class OwnError(BaseException):
    """What some libraries raise to get past `except Exception`."""


@pytest.mark.parametrize("raised", [GeneratorExit, asyncio.CancelledError, OwnError, SystemExit])
def test_whatever_the_user_raises_is_theirs(raised):
    def spoil():
        raise raised

    with pytest.raises(UserCodeError, match=r"the step (raised|ended)"), user_code(what="the step"):
        spoil()


def test_the_users_working_folder_is_theirs_alone(tmp_path):
    before = Path.cwd()
    forget_working_folder()
    with user_code():
        os.chdir(tmp_path)
        with user_code():
            assert Path.cwd() == tmp_path
    assert Path.cwd() == before
    seen = []

    def spoil():
        seen.append(Path.cwd())
        raise ValueError

    with pytest.raises(UserCodeError), user_code():
        spoil()
    assert seen == [tmp_path]
    assert Path.cwd() == before
    forget_working_folder()
    with user_code():
        assert Path.cwd() == before


def test_a_working_folder_that_has_been_removed_is_no_crash(tmp_path):
    before = Path.cwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    forget_working_folder()
    with user_code():
        os.chdir(gone)
        gone.rmdir()
    assert Path.cwd() == before
    with user_code():
        assert Path.cwd() == before
