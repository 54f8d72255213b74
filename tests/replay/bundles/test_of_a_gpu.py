"""A bundle that a GPU wrote replays where there is none: under CUDA's autocast, with what names a device heard."""

from __future__ import annotations

import json

from ampdoctor import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


def test_it_replays_under_cudas_policy(bundle, code):
    file = bundle / "manifest.json"
    said = json.loads(file.read_text())
    said.update(policy="cuda", precision="fp16")
    for one in said["instructions"]:
        if one["kind"] in ("call", "op") and one["mode"]["autocast"] is not None:
            one["mode"]["autocast"] = ["cuda", "torch.float16"]
    for entry in (*said["given"], *said["parameters"].values()):
        entry["device"] = "cuda:0"
    call = next(place for place, one in enumerate(said["instructions"]) if one["kind"] == "call")
    moved = {
        "kind": "op",
        "function": "torch.Tensor.to",
        "args": [{"kind": "given", "index": 0}, {"kind": "device", "value": "cuda:0"}],
        "kwargs": {"non_blocking": True},
        "results": {"": 2**40},
        "mode": {"autocast": None, "cached": True, "gradients": True},
        "random": None,
        "line": None,
    }
    said["instructions"].insert(call, moved)
    said["instructions"][call + 1]["args"][0] = {"kind": "made", "index": 2**40}
    said["random"] = [{**state, "cuda": [state["torch"]]} for state in said["random"]]
    file.write_text(json.dumps(said))
    report = bisect_nan(ReplayRequest(factory=str(bundle), model=str(code), compare_steps=0, device="cpu"))
    assert report.errors == ()
    assert report.verdict == "healthy"
    assert (report.run["policy"], report.run["precision"]) == ("cuda", "fp16")
