"""A factory builds: where it trains, or writes into the working tree, it is stopped before anything is lost."""

from __future__ import annotations

import shutil
import sys
import threading

import pytest
import torch

from ampdoctor.errors import FactoryError
from ampdoctor.evidence.log_records import EndLine, RunLine
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.replay.factory import load_factory
from ampdoctor.replay.user_files import audit_file_writes
from ampdoctor.replay.user_modules import factories_in

TRAIN = """
import logging
import os
import pathlib
import shutil
import threading
import torch
from torch import nn
from ampdoctor import TrainingRun

def get_batch():
    return torch.randn(2, 4)

def make_batches():
    return [get_batch()]

def build_model():
    model = nn.Linear(4, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model

def training_step_factory(model):
    model(get_batch()).sum().backward()

def train(lr=0.1):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(2):
        model(get_batch()).square().mean().backward()
        optimizer.step()
    return model

def swallowing():
    try:
        return train()
    except Exception:
        return build_model()

def saving():
    torch.save(build_model().state_dict(), "model.pt")
    return build_model()

def logging_too():
    handler = logging.FileHandler("train.log")
    logging.getLogger("x").addHandler(handler)
    handler.close()
    logging.getLogger("x").removeHandler(handler)
    return build_model()

def removing():
    os.remove("model.pt")

def removing_a_folder():
    shutil.rmtree("runs", ignore_errors=True)

def moving():
    os.replace("model.pt", "old.pt")

def moving_into():
    with open(".new", "w") as file:
        file.write("x")
    os.replace(".new", "model.pt")

def truncating():
    os.truncate("model.pt", 0)

def linking():
    os.symlink("model.pt", "latest.pt")

def removing_a_link():
    os.remove("link.pt")

def saving_safely():
    from safetensors.torch import save_file
    save_file(build_model().state_dict(), "model.safetensors")

def scripting():
    torch.jit.script(build_model()).save("scripted.pt")

def threaded():
    thread = threading.Thread(target=truncating)
    thread.start()
    thread.join()
    return build_model()

def tidy():
    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out/one")
    pathlib.Path("missing.pt").unlink(missing_ok=True)
    for path in ".hidden/state.pt", "__pycache__/state.pyc":
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".tmp", "w") as file:
            file.write("x")
        os.replace(path + ".tmp", path)
        os.remove(path)
    os.close(os.open("data.lock", os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    os.remove("data.lock")
    with open("train.log", "a") as file:
        file.write("made")
    return build_model()

def caching(folder=None):
    torch.save({}, f"{folder}/cache.pt")
    open("/dev/null", "w").close()
    return build_model()

def with_state():
    return train(lr=0.0)

def assembled() -> nn.Module:
    return build_model()

def mine():
    def step(model, batch, optimizer):
        model(batch).sum().backward()
        optimizer.step()
    return TrainingRun(model=build_model(), batches=make_batches(), step=step)

def resumed() -> TrainingRun:
    return TrainingRun(model=train(), batches=make_batches(), loss=lambda model, batch: model(batch).sum())

def main():
    train()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working tree with a training script and its checkpoint."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    (work / "top.py").write_text(f"{TRAIN}\nmain()\n")
    torch.save({"epoch": 3}, work / "model.pt")
    (work / "runs").mkdir()
    (work / "runs" / "metrics.csv").write_text("1")
    (tmp_path / "elsewhere.pt").write_text("x")
    (work / "link.pt").symlink_to(tmp_path / "elsewhere.pt")
    monkeypatch.chdir(work)
    yield work
    for name in ("train", "top"):
        sys.modules.pop(name, None)


def files_of(folder):
    """The files that are not hidden, with what is in them."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path: path.read_bytes() for path in paths if not path.name.startswith(".")}


@pytest.mark.parametrize(
    ("function", "did"),
    [
        ("main", "steps an optimizer at train.py:31"),
        ("swallowing", "steps an optimizer at train.py:31"),
        ("saving", "opens model.pt for writing at train.py:41"),
        ("removing", "removes model.pt at train.py:52"),
        ("removing_a_folder", "removes runs at train.py:55"),
        ("moving", "moves model.pt to old.pt at train.py:58"),
        ("moving_into", "moves .new to model.pt at train.py:63"),
        ("truncating", "truncates model.pt at train.py:66"),
        ("linking", "links latest.pt to model.pt at train.py:69"),
        ("removing_a_link", "removes link.pt at train.py:72"),
        ("saving_safely", "opens model.safetensors for writing at train.py:76"),
        ("scripting", "opens scripted.pt for writing at train.py:79"),
        ("threaded", "truncates model.pt at train.py:66"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_what_trains_or_writes_is_stopped_before_it_does(folder, function, did, capfd, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # Python's own, and not pytest's
    before = files_of(folder)
    factory = load_factory(f"train.py:{function}")
    with pytest.raises(FactoryError, match="a factory builds a fresh model") as error:
        factory.make(batches=[1], loss=lambda model, batch: None)
    assert str(error.value).startswith(f"the factory 'train.py:{function}' {did}, and was stopped there")
    assert files_of(folder) == before
    assert capfd.readouterr().err == ""


def test_a_script_that_trains_where_it_is_imported_is_stopped(folder):
    with pytest.raises(FactoryError, match=r"steps an optimizer at top.py:31.*if __name__ == \"__main__\""):
        load_factory("top.py:build_model")


@pytest.mark.parametrize("function", ["logging_too", "with_state", "build_model", "assembled", "tidy"])
def test_what_builds_is_left_alone_each_time(folder, function):
    factory = load_factory(f"train.py:{function}")
    for _ in range(2):
        made = factory.make(batches=[1], loss=lambda model, batch: None)
        assert isinstance(made.model, torch.nn.Linear)


def test_what_says_that_it_makes_a_run_may_step_for_its_state_and_still_writes_nothing(folder):
    assert isinstance(load_factory("train.py:resumed").make().model, torch.nn.Linear)
    handed = load_factory(load_factory("train.py:train").function)
    assert handed.make(batches=[1], loss=lambda model, batch: None).model is not None
    with pytest.raises(FactoryError, match=r"opens model\.pt for writing"):
        load_factory(load_factory("train.py:saving").function).make()


def test_what_is_written_elsewhere_is_nobodys_work(folder, tmp_path, monkeypatch):
    load_factory("train.py:caching").make({"folder": str(tmp_path)}, batches=[1], loss=lambda model, batch: None)
    assert (tmp_path / "cache.pt").is_file()
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    for inside in (folder / ".cache", folder / "hub"):
        inside.mkdir()
        load_factory("train.py:caching").make({"folder": str(inside)}, batches=[1], loss=lambda model, batch: None)
    monkeypatch.setenv("HF_HOME", str(folder))  # names no folder of its own
    with pytest.raises(FactoryError, match=r"removes model\.pt"):
        load_factory("train.py:removing").make()


def test_only_what_looks_like_a_factory_is_one(folder):
    assert factories_in(folder / "train.py") == ["mine", "resumed", "assembled", "build_model"]
    assert factories_in(folder / "none.py") == []


# -- which changes to files are told, and whose --


def test_our_log_writes_beside_the_run_and_is_none_of_its_changes(tmp_path):
    """Its thread would be ended where a change ends what makes it."""
    told = []
    with audit_file_writes([tmp_path], lambda did, _place: told.append(did)):
        log = RunLog(tmp_path / "health", RunLine(name="run"))
        log.describe(script={"command": ["train.py"]})
        log.write(EndLine(exit_code=0, steps=0, accepted=0))
        log.close()
    assert sorted(file.name for file in (tmp_path / "health").iterdir()) == ["log.jsonl", "run.json"]
    assert told == []


def test_a_thread_of_the_run_that_calls_only_python_is_told_of(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.pt").write_text("here")
    told = []
    with audit_file_writes([tmp_path], lambda did, _place: told.append(did)):
        thread = threading.Thread(target=shutil.rmtree, args=(tmp_path / "old",))
        thread.start()
        thread.join()
    assert [did.split()[0] for did in told] == ["removes"]
