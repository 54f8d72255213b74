"""Nothing in a bundle is executed, or believed."""

from __future__ import annotations

import json

import pytest

from ampdoctor.errors import AmpdoctorError, CheckpointError, FactoryError
from tests.replay.bundles.steps import load_bundle

EVIL = "subprocess:Popen"


def edited(bundle, edit):
    file = bundle / "manifest.json"
    said = json.loads(file.read_text())
    edit(said)
    file.write_text(json.dumps(said))


def _call(said):
    return next(one for one in said["instructions"] if one["kind"] == "Call")


def _op(said):
    return next(one for one in said["instructions"] if one["kind"] == "Op")


def _function(said, name):
    _op(said)["function"]["name"] = name


EDITS = {
    "another schema": lambda said: said.update(schema=99),
    "a partial as a function": lambda said: _op(said).update(
        function={
            "kind": "partial",
            "parts": [_op(said)["function"], {"kind": "tuple", "items": []}, {"kind": "dict", "items": []}],
        }
    ),
    "an autocast of another device": lambda said: _call(said)["mode"]["autocast"]["items"].__setitem__(0, "xla"),
    "a backward without seeds": lambda said: next(one for one in said["instructions"] if one["kind"] == "Backward")[
        "seeds"
    ]["items"].clear(),
    "a function that is not torch's to override": lambda said: _function(said, "torch.load"),
    "a method that pickles": lambda said: _function(said, "torch.Tensor.__reduce_ex__"),
    "a path of attributes": lambda said: _function(said, "torch.Tensor.__init__.__globals__"),
    "a class as an argument": lambda said: _call(said)["args"]["items"].append({"kind": "class", "class": EVIL}),
    "an unknown kind": lambda said: _call(said)["args"]["items"].append({"kind": "pickle", "value": "gASV"}),
    "a dunder": lambda said: _call(said)["args"]["items"].append(
        {"kind": "object", "class": "torch.nn.modules.linear:Linear", "fields": {"__class__": 1}}
    ),
    "a tensor of nobody": lambda said: _call(said)["args"]["items"].append({"kind": "ResultRef", "index": 12345678}),
    "a negative index": lambda said: _call(said)["args"]["items"].append({"kind": "InputRef", "index": -1}),
    "a random state beyond": lambda said: _call(said)["random"].update(index=10**9),
    "a module that is not there": lambda said: _call(said).update(model="nowhere"),
    "a shape that lies": lambda said: said["given"][0].update(shape=[2**40, 2**40]),
    "an expansion without end": lambda said: said["given"][0].update(stored_shape=[32, 8], shape=[2**44, 8]),
    "a dtype that is none": lambda said: said["given"][0].update(dtype="torch.load"),
    "a key that is not there": lambda said: said["given"][0].update(key="../../etc/passwd"),
    "a policy": lambda said: said.update(policy="rm"),
    "no model": lambda said: said.pop("model"),
    "the model's class": lambda said: said["model"]["made"].update({"class": EVIL}),
    "deep nesting": lambda said: _call(said)["args"]["items"].append(_nested(200)),
    "an autocast for nothing": lambda said: _call(said)["mode"]["autocast"]["items"].__setitem__(
        1, {"kind": "torch", "value": "torch.load"}
    ),
}


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_a_manifest_that_lies_is_refused_in_a_sentence(bundle, code, edit):
    edited(bundle, edit)
    with pytest.raises(AmpdoctorError) as refused:
        load_bundle(str(bundle), model=str(code))
    assert "\n" not in str(refused.value)


def test_a_key_that_stands_twice_is_refused(bundle, code):
    file = bundle / "manifest.json"
    file.write_text(file.read_text().replace('"schema": 3,', '"schema": 3, "schema": 3,', 1))
    with pytest.raises(CheckpointError, match="has the key 'schema' twice"):
        load_bundle(str(bundle), model=str(code))


def test_a_manifest_that_is_too_large_is_not_read(bundle, code):
    with (bundle / "manifest.json").open("r+b") as file:
        file.truncate(40 * 1024 * 1024)
    with pytest.raises(CheckpointError, match="beyond the limit"):
        load_bundle(str(bundle), model=str(code))


@pytest.mark.parametrize("name", ["calls.safetensors", "state.safetensors"])
def test_a_truncated_file_is_refused(bundle, code, name):
    file = bundle / name
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="truncated"):
        load_bundle(str(bundle), model=str(code))


def test_without_code_the_sentence_says_what_to_type(bundle, code):
    with pytest.raises(FactoryError, match=rf"its model is Net; add --model \S*{code.name}"):
        load_bundle(str(bundle))


def test_another_model_is_told_by_its_parameters(bundle, tmp_path):
    (tmp_path / "m.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Linear(2, 2)\n")
    with pytest.raises(
        FactoryError, match=r"makes another model than the bundle's: it lacks first\.weight, first\.bias"
    ):
        load_bundle(str(bundle), model=f"{tmp_path / 'm.py'}:make")


def test_what_the_users_file_imports_is_not_the_bundles_to_name(bundle, code):
    code.write_text(f"from subprocess import Popen\n{code.read_text()}")
    edited(bundle, lambda said: said["model"]["made"]["kwargs"].update(act={"kind": "class", "class": EVIL}))
    with pytest.raises(FactoryError, match="was made with the class Popen of subprocess, which is not there"):
        load_bundle(str(bundle), model=str(code))


def test_a_script_that_trains_is_not_run(bundle, code, tmp_path):
    ran = tmp_path / "ran"
    code.write_text(
        code.read_text()
        + f"\nWIDTH = 8\nmodel = Net(Config(WIDTH))\nopen({str(ran)!r}, 'w').close()\n"
        + "for step in range(3):\n    model(torch.randn(4, 8))\n"
    )
    run = load_bundle(str(bundle), model=str(code))
    assert not ran.exists()
    assert type(run.model).__name__ == "Net"
    assert any("its imports, functions, classes and simple constants alone were taken" in note for note in run.notes)
