"""What `run.json` says of the machine."""

from __future__ import annotations

import json
import sys

import torch

from ampdoctor.live.log.facts import hardware, software
from ampdoctor.live.log.run_log import RunLog
from tests.live.log.logs import HEADER


def test_versions_and_hardware_come_into_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    log = RunLog(tmp_path, HEADER)
    log.describe(**software(), **hardware())
    assert log.close()
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["command"] == sys.orig_argv
    assert facts["software"]["torch"] == torch.__version__
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert "SECRET_TOKEN" not in facts["environment"]
    assert facts["hardware"]["torch_threads"] == torch.get_num_threads()


def test_cuda_is_not_asked_before_the_run_uses_it(monkeypatch):
    def refuse():
        raise AssertionError("asking begins to use CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", refuse)
    assert "devices" not in hardware()["hardware"]
