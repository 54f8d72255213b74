"""A bundle is there whole, or not at all; its cap leaves out what can be had elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ampdoctor import bisect_nan
from ampdoctor.errors import OutputError, ReplayError
from ampdoctor.replay.bundles import write
from ampdoctor.replay.bundles.write import write_bundle
from ampdoctor.workflows.requests import ReplayRequest
from tests.replay.bundles.steps import gradients, load_bundle, replayed, same

ROOM = 1 << 20


def calls_of(folder):
    file = folder / "calls.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    buffers = 16 * 4 * 2 + 8
    return file.stat().st_size - 8 - header + buffers


def test_then_the_parameters_which_a_checkpoint_brings(recorded, bundle, code, tmp_path):
    real = gradients(recorded.model)
    written = write_bundle(tmp_path / "b", recorded.program, made=recorded.made.of, max_bytes=ROOM + calls_of(bundle))
    assert [said.partition(" (")[0] for said in written.left_out] == ["the optimizer's state", "the parameters"]
    assert "--checkpoint" in written.left_out[1]
    run = load_bundle(str(tmp_path / "b"), model=str(code))
    run.model.load_state_dict(recorded.model.state_dict())
    same(replayed(run)[1], real)
    asked = ReplayRequest(factory=str(tmp_path / "b"), model=str(code), compare_steps=0)
    with pytest.raises(ReplayError, match="without the parameters, for its size: give a checkpoint"):
        bisect_nan(asked)
    torch.save({"model": recorded.model.state_dict()}, tmp_path / "c.pt")
    report = bisect_nan(replace(asked, checkpoint=str(tmp_path / "c.pt")))
    assert report.verdict == "healthy"


def test_the_calls_are_never_left_out(recorded, tmp_path):
    with pytest.raises(OutputError, match=r"what entered the step takes \S+ MB, and the bundle may have 1\.05 MB"):
        write_bundle(tmp_path / "b", recorded.program, max_bytes=ROOM)
    assert list(tmp_path.iterdir()) == [tmp_path / "code"]


def test_a_full_disk_leaves_nothing(recorded, tmp_path, monkeypatch):
    def full(path, _tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "write_safetensors", full)
    with pytest.raises(OutputError, match="no space left on device"):
        write_bundle(tmp_path / "b", recorded.program)
    assert list(tmp_path.iterdir()) == [tmp_path / "code"]


def test_nothing_is_written_over(recorded, bundle):
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}
    with pytest.raises(OutputError, match="exists: a bundle is never written over anything"):
        write_bundle(bundle, recorded.program)
    assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before


def test_what_has_no_inert_form_is_named(loop, tmp_path):
    class Scaled(torch.nn.Linear):
        def forward(self, x, how):
            return super().forward(how(x))

    model = Scaled(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = loop.record(lambda _step: model(torch.randn(4, 3), lambda x: x * 2).sum().backward(), optimizer, steps=1)
    written = write_bundle(tmp_path / "b", program)
    assert not written.replays
    said = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert said["instructions"] == []
    assert len(said["cannot"]) == 1
    assert said["cannot"][0].startswith("the call of the model takes the function ")
    assert said["cannot"][0].endswith("<lambda>")
