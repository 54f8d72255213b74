"""What torch says of a GPU where there is none, and to whom."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.errors import ReplayError
from ampdoctor.precision.fake_gpu.emulate import DEVICE_NOTE, YES_NOTE, emulate_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and nothing is emulated")

ASKED = {
    "torch.cuda.is_available()": True,
    "torch.cuda.device_count()": 1,
    "torch.cuda.is_bf16_supported()": True,
    "torch.cuda.is_initialized()": True,
    "torch.cuda.get_arch_list()": ["sm_80"],
    "torch.accelerator.is_available()": True,
    "torch.accelerator.current_accelerator().type": "cuda",
    "torch.backends.cuda.is_built()": True,
    "torch.backends.cudnn.is_available()": True,
    "torch.distributed.is_nccl_available()": True,
    "torch.version.cuda.split('.')[0]": "12",
    "torch.ones(2).is_cuda": True,
    "torch.nn.Parameter(torch.ones(2)).device.type": "cuda",
    "torch.ones(2).device == torch.ones(2, device='cuda').device == torch.device('cuda:0')": True,
    "torch.ones(2).get_device()": 0,
    "torch.ones(2).is_cpu": False,
    "torch.ones(2, device='meta').is_cuda": False,
    "torch.ones(2, device='meta').device.type": "meta",
}
"""What those hear who hear yes; each in one way with the others."""
SERVED = {
    "torch.cuda.get_device_capability()": (8, 0),
    "torch.cuda.get_device_properties(0).name == torch.cuda.get_device_name()": True,
    "torch.cuda.get_device_properties('cuda').major": 8,
    "torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory": True,
    "0 < torch.cuda.memory_allocated() <= torch.cuda.max_memory_reserved()": True,
    "torch.cuda.memory_stats()['allocated_bytes.all.peak'] > 0": True,
    "torch.accelerator.current_device_index()": 0,
    "torch.cuda.utilization()": 0,
    "torch.cuda.nvtx.mark('x') or torch.cuda.profiler.start()": None,
    "torch.cuda.FloatTensor([1.0]).type('torch.cuda.HalfTensor').dtype == torch.float16": True,
    "torch.fft.fftfreq(4, device='cuda').shape == (4,)": True,
    "torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged, device='cuda').size(0)": 1,
    "torch.cuda.cudart().cudaProfilerStart()": 0,
    "torch.cuda.is_current_stream_capturing()": False,
}


def asked_by(package, code):
    """Evaluate as code of an installed package's."""
    filename = f"/opt/python3/lib/site-packages/{package}/utils.py" if package else "/home/user/train.py"
    return eval(compile(code, filename, "eval"), {"torch": torch, "__name__": package or "train"})


@pytest.mark.parametrize("package", ["", "transformers", "accelerate"])
def test_who_trains_hears_of_one_device(package):
    with emulate_cuda() as emulation:
        assert {code: asked_by(package, code) for code in ASKED} == ASKED
        assert {code: asked_by(package, code) for code in SERVED} == SERVED
    assert emulation.notes == (YES_NOTE,)


@pytest.mark.parametrize("package", ["torch", "lightning", "peft", "ampdoctor"])
def test_others_hear_the_truth(package):
    both = [code for code in ASKED if not any(only in code for only in ("version", "current_acc", "device='cuda'"))]
    truth = {code: asked_by("", code) for code in both}
    with emulate_cuda() as emulation:
        heard = {code: asked_by(package, code) for code in both}
        assert asked_by(package, "torch.version.cuda") is None
        assert asked_by(package, "torch.accelerator.current_accelerator()") is None
    assert heard == truth
    assert emulation.notes == ()


def test_a_training_for_a_cpu_hears_the_truth_and_runs_all_the_same():
    with emulate_cuda(reports_cuda=False) as emulation:
        assert not torch.cuda.is_available()
        assert torch.version.cuda is None
        assert torch.ones(2, device="cuda").device.type == "cpu"
        assert torch.cuda.get_device_capability() == (8, 0)
    assert emulation.notes == (DEVICE_NOTE,)


def test_the_devices_random_state_is_the_cpus():
    torch.manual_seed(0)
    with emulate_cuda():
        states = torch.cuda.random.get_rng_state_all()
        first = torch.rand(2, device="cuda")
        torch.cuda.set_rng_state_all(states)
        assert torch.equal(torch.rand(2), first)
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))  # from a GPU: nothing here draws from it
        with torch.random.fork_rng(devices=[0]):
            torch.cuda.manual_seed(7)
            assert torch.cuda.initial_seed() == 7
        assert torch.initial_seed() == 0


def test_streams_and_events():
    with emulate_cuda():
        side, x = torch.cuda.Stream(), torch.ones(2, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
            start.record()
            x.record_stream(side)
        with side, torch.cuda.stream(None):
            assert torch.accelerator.current_stream() is side
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        side.wait_stream(torch.cuda.current_stream())
        side.record_event(end)
        assert end.query()
        assert 0 < start.elapsed_time(end) < 1e4
        with pytest.raises(ValueError, match="recorded"):
            start.elapsed_time(torch.cuda.Event(enable_timing=True))
        with pytest.raises(ReplayError, match="CUDA graph"):
            torch.cuda.CUDAGraph()


def test_map_locations_lead_to_the_cpu(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with emulate_cuda():
        for place in (None, "cuda", lambda storage, _: storage.cuda(0), {"cuda:1": torch.device("cuda:0")}):
            assert torch.load(tmp_path / "w.pt", map_location=place)["w"].sum() == 2


@pytest.mark.parametrize("kernel", ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH"])
def test_attention_kernels_that_only_a_gpu_has(kernel):
    q = torch.ones(1, 1, 4, 8, dtype=torch.float16)
    with emulate_cuda(), torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).shape == q.shape


def test_integers_are_counted_as_cuda_counts_them():
    counted = torch.tensor([0, 2, 2], dtype=torch.int32)
    with emulate_cuda():
        assert torch.histc(counted, bins=3, min=0, max=2).tolist() == [1, 0, 2]
    with pytest.raises(RuntimeError):
        torch.histc(counted, bins=3, min=0, max=2)
