"""Another process, without the training's data: the commands say what the loop's own machine would."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampdoctor.replay.bundles.model import code_of, described
from ampdoctor.replay.bundles.write import write_bundle


@pytest.fixture
def sick(loop, theirs, tmp_path):
    """Returns the folder of a bundle whose step takes the logarithm of 0, and the line."""
    torch.manual_seed(1)
    with loop.made.recording():
        model = theirs.Net(theirs.Config(8), act=nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(_step):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(torch.randn(32, 8))
        torch.log(out.float().clamp(min=0)).mean().backward()

    line = train.__code__.co_firstlineno + 4
    program = loop.record(train, optimizer, steps=1)
    write_bundle(tmp_path / "bundle-31000", program, made=loop.made.of, policy="cuda")
    return SimpleNamespace(folder=tmp_path / "bundle-31000", line=line)


def test_a_laptop_says_step_op_and_line(sick, code, run_cli):
    asked = ("bisect-nan", str(sick.folder), "--model", code.name, "--format", "json")
    said = run_cli(*asked, cwd=code.parent, env={"CUDA_VISIBLE_DEVICES": ""})
    assert said.returncode == 1, said.stderr
    report = json.loads(said.stdout)
    (finding, *_) = report["findings"]
    assert finding["code"] == "AMP202"
    where = finding["where"]
    assert (where["op"], where["phase"], where["step"]) == ("aten.log", "loss", 31000)
    assert where["source"]["line"] == sick.line
    assert report["run"]["policy"] == "cuda"
    assert report["target"]["options"] == {"--model": [code.name]}


def test_a_model_without_a_bundle_is_refused(code, run_cli):
    refused = run_cli("bisect-nan", f"{code}:make_model", "--model", str(code))
    assert refused.returncode == 2
    assert "makes the model of a bundle, and" in refused.stderr


# -- what `--model` has to name for a bundle's model, as the report of a watched training says it --


MADE = {"kind": "made", "made": {"class": "__main__:GPT", "file": "gpt.py", "args": [], "kwargs": {}}}
LIBRARY = {"kind": "transformers", "class": "GPT2LMHeadModel", "config": {}}


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (MADE, "gpt.py"),
        ({"kind": "wrapped", "attribute": "module", "module": MADE}, "gpt.py"),
        ({"kind": "several", "children": {"first": LIBRARY, "second": MADE}}, "gpt.py"),
        ({"kind": "function", "class": "__main__:Net", "file": "train.py", "why": ""}, "train.py:make_model"),
        ({"kind": "function", "class": "__main__:Net", "file": "a\nb.py", "why": ""}, "train.py:make_model"),
        (LIBRARY, None),
        ({"kind": "peft", "adapter": "default", "config": {}, "module": LIBRARY}, None),
    ],
    ids=["a class", "wrapped", "several", "a function", "a name that nobody types", "a library's", "with adapters"],
)
def test_a_model_is_made_again_by(said, code):
    assert code_of(said) == code


def test_torchs_own_layers_take_no_code():
    assert code_of(described(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda _module: None)) is None
