"""What is said instead of a refusal: the ways in, from files that are read as text only; paths as they were typed."""

from __future__ import annotations

import pytest

from ampdoctor.cli.main import main
from ampdoctor.cli.suggest import target_in

RAISES = "raise SystemExit('this file is read as text, and never run')\n"
LOOP = "import torch\nfor batch in loader:\n    loss.backward()\n    optimizer.step()\n"
FILES = {
    "loop.py": (LOOP, "loop.py"),
    "hf.py": ("from transformers import Trainer\ntrainer.train()\n", "hf.py"),
    "sft.py": ("from trl import SFTTrainer\ntrainer.train()\n", "sft.py"),
    "own_loop.py": ("import transformers\nmodel.train()\n" + LOOP, "own_loop.py"),
    "pl.py": ("import pytorch_lightning as pl\ntrainer.fit(module)\n", "pl.py"),
    "hf_loop.py": ("from accelerate import Accelerator\naccelerator.backward(loss)\n", "hf_loop.py"),
    "factory.py": (
        "from ampdoctor import TrainingRun\ndef run():\n    return TrainingRun(model=1)\n" + LOOP,
        "factory.py:run",
    ),
    "zero.py": (
        "import torch, deepspeed\nengine = deepspeed.initialize()\nengine.backward(loss)\nengine.step()\n",
        None,
    ),
    "sklearn.py": ("import sklearn\nmodel.fit(x, y)\n", None),
    "broken.py": ("def f(:\n", None),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (text, _) in FILES.items():
        (tmp_path / name).write_text(RAISES + text)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_known_by_its_text(name, folder):
    assert target_in(next(path for path in folder.glob(name)).relative_to(folder)) == FILES[name][1]


@pytest.mark.parametrize("command", ["bisect-nan", "profile", "recommend"])
def test_a_command_without_a_target_says_what_can_be_replayed(command, folder, capsys):
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert f"ampdoctor {command} train.py -- --its arguments" in said
    assert ("--until-sick" in said) == (command == "bisect-nan")
    assert f"  ampdoctor {command} hf.py\n" in said
    assert "and 2 more files" in said


def test_a_folder_without_trainings_is_not_spoken_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bisect-nan"]) == 2
    assert "In this folder" not in capsys.readouterr().err


def test_a_notebook_is_to_be_made_a_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run.ipynb").write_text("{}")
    assert main(["bisect-nan", "my run.ipynb"]) == 2
    assert "jupyter nbconvert --to script 'my run.ipynb'" in capsys.readouterr().err


def test_another_mistake_is_not_answered_with_all_ways_in(folder, capsys):
    assert main(["bisect-nan", "--stepz", "3", "loop.py"]) == 2
    assert "What can be replayed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("weights/short.safetensors", "weights/short.safetensors is truncated: "),
        ("weights/none.pt", "weights/none.pt does not exist.\n"),
        ("weights/*.pt", "weights/*.pt does not exist: the shell has found no file that this pattern matches.\n"),
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
