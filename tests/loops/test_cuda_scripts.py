"""Scripts that name CUDA throughout, run up to their loops and diagnosed on a CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ampdoctor.errors import AmpdoctorError
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.loops.trained import LOOPS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the scripts would find the GPU that is emulated"),
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*is deprecated:FutureWarning"),
]
DECIDED = {
    "nanogpt": ("forward-overflow", "matmul"),
    "ddp_single": ("forward-overflow", "mul"),
    "prefetcher": ("bad-data", "_to_copy"),
    "flash": ("forward-overflow", "mul"),
    "memory_log": ("forward-overflow", "matmul"),
}
"""By script: what its sick run has, and the op that makes it."""


@pytest.fixture
def diagnosed(check_report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def diagnose(name, *, sick, policy="cuda"):
        before = (set(sys.modules), list(sys.meta_path), torch.get_rng_state())
        script = str(LOOPS / "cuda" / f"{name}.py")
        arguments = ("--sick",) if sick else ()
        report = bisect_nan(ReplayRequest(factory=script, script_arguments=arguments, steps=3, policy=policy))
        check_report(render_json(report))
        assert not {name for name in set(sys.modules) - before[0] if name.startswith("flash_attn")}
        assert sys.meta_path == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
        assert not dist.is_initialized()
        return report

    return diagnose


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if place != 1 else name for place, name in enumerate(DECIDED)]
)
def test_a_sick_script_is_diagnosed(diagnosed, name):
    report = diagnosed(name, sick=True)
    assert report.verdict == "sick"
    (first, *_) = report.findings
    said, op = DECIDED[name]
    assert first.name == said
    assert op in first.where.op
    assert Path(first.where.source.file).name == f"{name}.py"


@pytest.mark.parametrize(
    ("name", "said"), [("ddp_single", "this script needs GPUs"), ("memory_log", "sys.exit(no GPU)")]
)
def test_with_the_cpus_own_casts_who_asks_hears_that_there_is_no_gpu(diagnosed, name, said):
    with pytest.raises(AmpdoctorError, match=re.escape(said)):
        diagnosed(name, sick=False, policy="native")


@pytest.mark.slow
@pytest.mark.parametrize("name", DECIDED)
def test_a_healthy_script_is_healthy(diagnosed, name):
    assert diagnosed(name, sick=False).verdict == "healthy"
