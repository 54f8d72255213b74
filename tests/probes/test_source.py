"""Lines of user code, as a report shows them."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from ampdoctor.evidence.location import Source
from ampdoctor.package import FOLDER
from ampdoctor.precision.fake_gpu import replace
from ampdoctor.probes import user_code
from ampdoctor.probes.user_code import HalfMade, as_source, shown_from, user_line
from ampdoctor.replay.user_files import is_users_file


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


def test_the_innermost_line_of_the_user():
    name, number = user_line()
    assert name == __file__
    assert number > 1


@pytest.mark.parametrize(
    "file",
    [
        Path(torch.__file__).parent.with_name("torchvision") / "models" / "resnet.py",
        FOLDER.with_name("ampdoctor-runs") / "train.py",
    ],
)
def test_a_folder_whose_name_begins_like_ours_or_torchs_is_neither(file):
    assert user_code._is_user(str(file))
    assert not user_code._is_user(str(FOLDER / "errors.py"))
    assert not user_code._is_user(torch.nn.functional.__file__)
    if "site-packages" not in file.parts:
        assert is_users_file(str(file))
    assert replace._package(str(file)) not in ("torch", "ampdoctor")


def test_what_pythons_own_library_calls_is_its_callers_line():
    class Asked:
        def __deepcopy__(self, memo):
            return user_code._is_user(copy.__file__), user_code._is_user(os.__file__)

    assert copy.deepcopy(Asked()) == (False, False)
    packages = Path(os.__file__).parent / "site-packages" / "pkg" / "a.py"
    assert user_code._is_user(str(packages))


# -- the line that makes a parameter float16 is known, whichever way it does; nothing is left in place --


def cast():
    return nn.Linear(2, 2).half()  # cast


def moved():
    return nn.Linear(2, 2).to(torch.float16)  # moved


def built():
    return nn.Linear(2, 2, dtype=torch.float16)  # built


def loaded():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))  # loaded
    return model


@pytest.mark.parametrize("make", [cast, moved, built, loaded], ids=lambda one: one.__name__)
def test_the_line_is_known(make):
    made = HalfMade()
    before = dict(vars(nn.Module))
    with made.recording():
        model = make()
    assert dict(vars(nn.Module)) == before
    source = made.of(model.parameters())
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[source.line - 1].endswith(f"# {make.__name__}")


def test_what_is_not_half_or_was_made_before_is_not_known():
    made, before = HalfMade(), nn.Linear(2, 2).half()
    with made.recording():
        wide = nn.Linear(2, 2).to(torch.float32)
    after = nn.Linear(2, 2).half()
    assert made.of([*before.parameters(), *wide.parameters(), *after.parameters()]) is None
