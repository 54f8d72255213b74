"""A bundle that a GPU wrote replays where there is none: under CUDA's autocast, with what names a device heard."""

from __future__ import annotations

import json

import pytest
import torch

from ampdoctor import bisect_nan
from ampdoctor.hooks.json_values import written
from ampdoctor.hooks.program import InputRef, Mode, Op, ResultRef
from ampdoctor.replay.bundles.instructions import instruction_out
from ampdoctor.workflows.requests import ReplayRequest


def test_it_replays_under_cudas_policy(bundle, code):
    file = bundle / "manifest.json"
    said = json.loads(file.read_text())
    said.update(policy="cuda", precision="fp16")
    for one in said["instructions"]:
        if one["kind"] in ("Call", "Op") and one["mode"]["autocast"] is not None:
            one["mode"]["autocast"] = written(("cuda", torch.float16))
    for entry in (*said["given"], *said["parameters"].values()):
        entry["device"] = "cuda:0"
    call = next(place for place, one in enumerate(said["instructions"]) if one["kind"] == "Call")
    moved = Op(
        function=torch.Tensor.to,
        args=(InputRef(0), torch.device("cuda:0")),
        kwargs={"non_blocking": True},
        results={"": ResultRef(2**40)},
        mode=Mode(),
        random=None,
        line=None,
    )
    said["instructions"].insert(call, instruction_out(moved, pytest.fail))
    said["instructions"][call + 1]["args"]["items"][0] = {"kind": "ResultRef", "index": 2**40}
    said["random"] = [{**state, "cuda": [state["torch"]]} for state in said["random"]]
    file.write_text(json.dumps(said))
    report = bisect_nan(ReplayRequest(factory=str(bundle), model=str(code), compare_steps=0, device="cpu"))
    assert report.errors == ()
    assert report.verdict == "healthy"
    assert (report.run["policy"], report.run["precision"]) == ("cuda", "fp16")
