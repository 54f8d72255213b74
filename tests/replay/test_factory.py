from __future__ import annotations

import contextlib
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.replay.factory import load_factory
from ampdoctor.replay.training_run import TrainingRun

TINY = Path(__file__).parents[2] / "fixtures" / "runs" / "tiny.py"

HEADER = """
import torch
from torch import nn
from ampdoctor.replay.training_run import TrainingRun

def run(model=None):
    return TrainingRun(
        model=nn.Linear(2, 2) if model is None else model, batches=[torch.ones(1, 2)], loss=lambda m, b: m(b).sum())
"""


@pytest.fixture(autouse=True)
def _path():
    path = list(sys.path)
    yield
    assert sys.path == path


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Writes the user's files below their working directory."""
    monkeypatch.chdir(tmp_path)

    def write(path, text, header=HEADER):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(header + textwrap.dedent(text))
        return file

    return write


def refused(spec, *, match, error=FactoryError, **options):
    with pytest.raises(error, match=match) as caught:
        load_factory(spec, **options).make()
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_file_a_module_a_dotted_attribute_and_a_callable(user):
    user("train.py", "class Config:\n    @staticmethod\n    def build():\n        return run()\n")
    user("pkg/inner/mod.py", "def make():\n    return run()\n")
    user("pkg/__init__.py", "", header="")
    user("pkg/inner/__init__.py", "", header="")
    for spec in ("train.py:run", "./train.py:Config.build", "train:run", "pkg.inner.mod:make", "pkg/inner/mod.py:make"):
        factory = load_factory(spec)
        first, second = factory.make(), factory.make()
        assert type(first).__name__ == "TrainingRun"
        assert first is not second
        assert factory.name == spec
    made = load_factory(lambda width=2: TrainingRun(model=nn.Linear(width, 1), batches=[1], loss=lambda m, b: None))
    assert made.make({"width": 7}).model.in_features == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"widht": 5}, "has no argument 'widht': did you mean 'width'. it takes width, precision"),
        ({"zzz": 5}, "has no argument 'zzz': it takes width, precision"),
    ],
)
def test_unknown_arguments_are_named_with_near_ones(arguments, sentence):
    with pytest.raises(FactoryError, match=sentence):
        load_factory(f"{TINY}:make_run").make(arguments)


def test_missing_arguments_are_named():
    def needs(depth, *, width, name="x", **rest):
        raise AssertionError

    with pytest.raises(FactoryError, match="needs depth, width: give --arg depth=JSON --arg width=JSON"):
        load_factory(needs).make()
    with pytest.raises(FactoryError, match="needs width"):
        load_factory(needs).make({"depth": 1, "anything": 2})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("train.py", r"names no function: write .*; train.py has make_run$"),
        ("train.make_run", r"names no function: write .*; did you mean 'train.py:make_run', with a colon\?$"),
        (":make_run", "names no module"),
        ("train.py:make_run()", "is not the name of a function: write the bare name"),
        ("my-module:f", "'my-module' is not the name of a module"),
        ("trian.py:make_run", "there is no file 'trian.py'; did you mean 'train.py'"),
        ("folder:f", "'folder' is a folder"),
        ("./notes.txt:f", "is not a Python file"),
        ("train.py:make_rum", r"train.py has no 'make_rum'; did you mean 'make_run'\?; candidates: make_run"),
        ("train.py:Config.bild", "Config of train.py has no 'bild'; did you mean 'build'"),
        ("trian:f", "there is no module 'trian' on the import path .*; did you mean 'train'"),
        ("train.py:WIDTH", "is not a function but int"),
        ("train.py:MODEL", "is a model that was made once"),
    ],
)
def test_each_wrong_form_has_its_sentence(user, spec, sentence):
    text = """
        def _run():
            return TrainingRun(model=nn.Linear(2, 2), batches=[1], loss=lambda m, b: m(b))
        WIDTH, MODEL, RUN = 3, nn.Linear(1, 1), _run()
        class Config:
            @staticmethod
            def build(): return _run()
        def make_run(): return _run()
        def helper(): pass
    """
    user("train.py", text, header="from torch import nn\nfrom ampdoctor.replay.training_run import TrainingRun\n")
    user("folder/train.py", "def make_run(): return run()\n")
    user("notes.txt", "", header="")
    refused(spec, match=sentence)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("None", "returned nothing: did you forget `return`"),
        ("(nn.Linear(1, 1), [1])", r"returned a tuple of parts: name them, as in TrainingRun\(model="),
        ("3", "returned int: it must return a TrainingRun, a model, or what a framework makes"),
        ("nn.Linear(1, 1)", "returns a bare model: say the rest with --batches and --loss"),
    ],
)
def test_each_wrong_return_has_its_sentence(user, body, sentence):
    user("train.py", f"def make():\n    return {body}\n")
    refused("train.py:make", match=sentence)


def test_what_the_factory_raises_is_theirs_with_their_traceback(user):
    user("train.py", "def helper():\n    raise ValueError('no data')\n\ndef make():\n    return helper()\n")
    error = refused(
        "train.py:make", match="the factory 'train.py:make' raised ValueError: no data", error=UserCodeError
    )
    assert "in helper" in error.traceback_text
    assert "ampdoctor/replay" not in error.traceback_text
    user("broken.py", "def make():\n    return TrainingRun(model=3, batches=[1])\n")
    refused("broken.py:make", match=r"TrainingRun\(model=...\) must be")
    user("exits.py", "import argparse, sys\n\ndef make():\n    sys.exit('bad arguments')\n")
    refused("exits.py:make", match=r"sys\.exit\(bad arguments\)", error=UserCodeError)


def test_import_errors_tell_the_missing_module_from_an_import_inside_it(user):
    user("inside.py", "import no_such_dependency\n")
    for spec in ("inside.py:make", "inside:make"):
        error = refused(spec, match="importing .*inside.* failed: .*no_such_dependency.*installed", error=UserCodeError)
        assert "import no_such_dependency" in error.traceback_text
        assert "importlib" not in error.traceback_text
    user("raises.py", "def setup():\n    1 / 0\nsetup()\n")
    error = refused("raises.py:make", match="raised ZeroDivisionError: division by zero", error=UserCodeError)
    assert "in setup" in error.traceback_text
    assert "raises" not in sys.modules
    user("syntax.py", "x = 1\ndef make(:\n    pass\n", header="")
    refused("syntax.py:make", match=r"syntax.py, line 2 is not valid Python: invalid syntax", error=UserCodeError)
    user("relative.py", "from .sibling import x\n", header="")
    refused("relative.py:make", match="needs an __init__.py", error=UserCodeError)
    user("exits.py", "raise SystemExit(2)\n", header="")
    refused("exits.py:make", match=r"importing the factory 'exits.py:make' ended the program", error=UserCodeError)


def test_relative_and_absolute_imports_of_a_package_named_by_its_file(user):
    for root, value in (("one", 1), ("two", 2)):
        user(f"{root}/proj/__init__.py", "", header="")
        user(f"{root}/proj/sub/__init__.py", "", header="")
        user(f"{root}/proj/config.py", f"WIDTH = {value}\n", header="")
        user(
            f"{root}/proj/sub/train.py",
            "from ..config import WIDTH\ndef make():\n    return run(nn.Linear(WIDTH, 1))\n",
        )
    one, two = load_factory("one/proj/sub/train.py:make"), load_factory("two/proj/sub/train.py:make")
    assert one.make().model.in_features == 1
    assert two.make().model.in_features == 2


def test_two_files_of_one_name_and_names_of_the_standard_library(user):
    for folder, width in (("a", 1), ("b", 2)):
        user(f"{folder}/train.py", f"def make():\n    return run(nn.Linear({width}, 1))\n")
    user("random.py", "def make():\n    return run()\n")
    a, b = load_factory("a/train.py:make"), load_factory("b/train.py:make")
    assert [f.make().model.in_features for f in (a, b)] == [1, 2]
    before = sys.modules["random"]
    load_factory("random.py:make").make()
    assert sys.modules["random"] is before


def test_a_file_finds_its_neighbours_and_the_working_directory_also_late(user):
    user("jobs/neighbour.py", "WIDTH = 3\n", header="")
    user("common_to_all.py", "DEPTH = 4\n", header="")
    user(
        "jobs/train.py",
        """
        from neighbour import WIDTH
        def make():
            from common_to_all import DEPTH
            return run(nn.Linear(WIDTH, DEPTH))
        def late():
            import late_neighbour
            return late_neighbour.VALUE
        """,
    )
    user("jobs/late_neighbour.py", "VALUE = 5\n", header="")
    before = list(sys.path)
    factory = load_factory("jobs/train.py:make")
    run = factory.make()
    assert (run.model.in_features, run.model.out_features) == (3, 4)
    assert sys.path == before
    with factory.user_code("the loss"):
        assert sys.modules["train"].late() == 5
    assert sys.path == before


def test_prints_and_argv(user, capsys):
    user(
        "train.py",
        "import sys\nprint('importing', sys.argv)\ndef make():\n    print('making', sys.argv)\n    return run()\n",
    )
    entered = []

    @contextlib.contextmanager
    def environment():
        entered.append("in")
        yield
        entered.append("out")

    load_factory("train.py:make", environment=environment).make()
    assert entered.count("in") == entered.count("out") > 1
    out, err = capsys.readouterr()
    file = str(Path("train.py").resolve())
    assert (out, err.splitlines()) == ("", [f"importing ['{file}']", f"making ['{file}']"])


def test_a_bare_model_with_batches_and_loss():
    factory = load_factory(f"{TINY}:make_model")
    run = factory.make(batches=f"{TINY}:make_batches", loss=f"{TINY}:loss")
    assert run.loss(run.model, next(run.batches())).isfinite()
    assert load_factory(f"{TINY}:Net").make(batches=[torch.ones(2, 4)], loss=lambda m, b: m(b).sum()).optimizer is None
    with pytest.raises(FactoryError, match="say the rest with --loss"):
        factory.make(batches=f"{TINY}:make_batches")
    with pytest.raises(FactoryError, match=r"tiny.py has no 'los'; did you mean 'loss'"):
        factory.make(batches=f"{TINY}:make_batches", loss=f"{TINY}:los")
    with pytest.raises(FactoryError, match="has its own batches and loss: leave out --loss"):
        load_factory(f"{TINY}:make_run").make(loss=f"{TINY}:loss")


def test_model_and_loss_of_one_file_share_its_classes(user):
    text = """
        class Net(nn.Module):
            pass
        def make():
            return Net()
        def loss(model, batch):
            assert isinstance(model, Net)
            return torch.ones(())
    """
    user("train.py", text)
    run = load_factory("train.py:make").make(batches=[1], loss="train.py:loss")
    assert run.loss(run.model, 1) == 1
