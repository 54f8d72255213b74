"""Scripts that enter something in places that the whole process shares: each of their runs finds these as they were."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from ampdoctor.replay.scripts.files import registrations_of
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

LOOP = """
import torch
from torch import nn
{before}
torch.manual_seed(0)
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = {loss}(net(x)).float().square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""

LIBRARY = """
lib = torch.library.Library("ampdoctor_twice", "DEF")
lib.define("same(Tensor x) -> Tensor")
lib.impl("same", lambda x: x.clone(), "CompositeImplicitAutograd")
"""
CUSTOM = """
@torch.library.custom_op("ampdoctor_twice::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor: return x.clone()
same.register_fake(lambda x: torch.empty_like(x))
same.register_autograd(lambda ctx, g: g)
"""
PROCESS_GROUP = """
import tempfile
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
"""
CALL = "torch.ops.ampdoctor_twice.same"
SCRIPTS = {
    "library": (LIBRARY, CALL),
    "custom_op_itself": (CUSTOM, "same"),
    "start_method": ("import torch.multiprocessing as mp\nmp.set_start_method('spawn')", ""),
    "threads": ("torch.set_num_interop_threads(2)", ""),
    "process_group": (PROCESS_GROUP, ""),
}


# torch gives it once a process, for whichever of these operators comes first
pytestmark = pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")


def report_of(script: Path):
    return bisect_nan(ReplayRequest(factory=str(script), steps=2))


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path):
    start = multiprocessing.context._default_context._actual_context
    multiprocessing.context._default_context._actual_context = None  # another test may have chosen one
    yield
    registrations_of(str(tmp_path / "train.py")).undo()
    multiprocessing.context._default_context._actual_context = start
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_may_register_what_is_refused_a_second_time(tmp_path, name):
    before, loss = SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before=before, loss=loss), encoding="utf-8")
    assert report_of(script).verdict == "healthy"
    if name == "library":
        assert report_of(script).verdict == "healthy", "a second examination in one process, as in a notebook"


def test_names_in_the_registries_of_libraries(tmp_path):
    pytest.importorskip("transformers")
    before = (
        "from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel\n"
        "class Config(PretrainedConfig): model_type = 'ampdoctor-twice'\n"
        "class Model(PreTrainedModel): config_class = Config\n"
        "AutoConfig.register('ampdoctor-twice', Config)\nAutoModel.register(Config, Model)\n"
    )
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before=before, loss=""), encoding="utf-8")
    assert report_of(script).verdict == "healthy"
