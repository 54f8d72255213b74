"""Scripts that name CUDA throughout, diagnosed on a CPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ampdoctor.errors import UserCodeError
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.reports.forms.to_json import render_json
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.opening.request import ReplayRequest

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the scripts would find the GPU that is emulated"),
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*is deprecated:FutureWarning"),
]
SCRIPTS = Path(__file__).parents[3] / "fixtures" / "loops" / "cuda"
DECIDED = {
    "nanogpt": ("forward-overflow", "matmul"),
    "ddp_single": ("forward-overflow", "mul"),
    "prefetcher": ("bad-data", "_to_copy"),
    "apex_style": ("forward-overflow", "_to_copy"),
    "flash": ("forward-overflow", "mul"),
    "memory_log": ("forward-overflow", "matmul"),
}
"""By script: what its sick run has, and the op that makes it."""


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"cuda_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def factory(name, sick):
    def make():
        script = loaded(name)
        if name == "prefetcher":
            model, optimizer, scaler = script.build()
            batches = lambda: script.batches(sick)  # noqa: E731
        elif name == "ddp_single":
            model, optimizer, scaler, batches = script.build(sick)
        else:
            model, optimizer, scaler = script.build(sick)
            batches = script.batches() if name != "nanogpt" else text_of(script)
        return TrainingRun(
            model=model, batches=batches, optimizer=optimizer, scaler=scaler, step=script.train_step, precision="fp16"
        )

    return make


def text_of(script):
    data = torch.randint(65, (512,), generator=torch.Generator().manual_seed(0))
    return list(islice(iter(lambda: script.get_batch(data), None), 6))


@pytest.fixture
def diagnosed(check_report):
    def diagnose(name, *, sick, policy="cuda", steps=3):
        before = (set(sys.modules), list(sys.meta_path), torch.get_rng_state())
        report = bisect_nan(ReplayRequest(factory=factory(name, sick), steps=steps, policy=policy))
        check_report(render_json(report))
        assert not {name for name in set(sys.modules) - before[0] if name.startswith(("apex", "flash_attn"))}
        assert sys.meta_path == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
        assert not dist.is_initialized()
        return report

    return diagnose


@pytest.mark.parametrize("name", DECIDED)
def test_a_sick_script_is_diagnosed(diagnosed, name):
    report = diagnosed(name, sick=True)
    assert report.verdict == "sick"
    (first, *_) = report.findings
    said, op = DECIDED[name]
    assert first.name == said
    assert op in first.where.op
    assert Path(first.where.source.file).name == f"{name}.py"


@pytest.mark.parametrize("name", ["prefetcher", "apex_style", "flash"])
def test_what_names_cuda_without_asking_is_diagnosed_with_the_cpus_own_casts(diagnosed, name):
    assert diagnosed(name, sick=True, policy="native").verdict == "sick"


@pytest.mark.parametrize(
    ("name", "said"),
    [("ddp_single", "this script needs GPUs"), ("memory_log", "ended the program with sys.exit(no GPU)")],
)
def test_with_the_cpus_own_casts_who_asks_hears_that_there_is_no_gpu(diagnosed, name, said):
    with pytest.raises(UserCodeError, match=re.escape(said)):
        diagnosed(name, sick=False, policy="native")


@pytest.mark.parametrize("name", DECIDED)
def test_a_healthy_script_is_healthy(diagnosed, name):
    report = diagnosed(name, sick=False)
    assert report.verdict == "healthy"
