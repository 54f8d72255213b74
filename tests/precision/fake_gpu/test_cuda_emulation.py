"""Small scripts as users write them for CUDA, imported and run on the CPU."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import textwrap

import pytest
import torch
import torch.cuda.amp

from ampdoctor.hooks.torch_internals import reset_default_device
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.fake_gpu.emulate import emulate_cuda

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the scripts would find the GPU that this emulates"),
    # torch itself calls these names deprecated; users' scripts are full of them
    pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.get_autocast_gpu_dtype.*:DeprecationWarning"),
]
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
_number = itertools.count()


@pytest.fixture
def user_module(tmp_path):
    def load(text):
        path = tmp_path / f"script_{next(_number)}.py"
        path.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def surface():
    """Everything that the emulation may replace, by identity."""
    amp = torch.amp
    owners = (torch, torch.cuda, torch.Tensor, torch.nn.Module, amp.autocast_mode, amp.autocast_mode.autocast)
    owners += (amp.grad_scaler.GradScaler, torch.utils._device.DeviceContext, torch.cuda.memory, torch.cuda.random)
    owners += (torch.cuda.nvtx, torch.accelerator, torch.version, torch.backends.cudnn, torch.distributed)
    owners += (type(os.environ), type(torch.version), torch.UntypedStorage)
    state = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cpu"))
    return [dict(vars(owner)) for owner in owners], state, list(sys.meta_path)


def test_everything_is_undone():
    before = surface()
    with emulate_cuda(), torch.autocast("cuda"):
        assert surface() != before
    assert surface() == before
    with pytest.raises(ZeroDivisionError), emulate_cuda(), emulate_cuda():
        1 / 0  # noqa: B018
    assert surface() == before
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not torch.amp.GradScaler().is_enabled()
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda"):
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


TRAINING = """
    import torch
    from torch import nn
    from torch.cuda.amp import GradScaler, autocast

    CTX = autocast()                      # built at import
    DEVICE = torch.device("cuda")
    SCALER = GradScaler(init_scale=1024.0, growth_interval=2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4, device="cuda")
            self.norm = nn.LayerNorm(4)
            self.seen = []

        @autocast()
        def forward(self, x):
            self.seen.append((torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda")))
            y = self.fc(x)
            self.seen.append(y.dtype)
            with autocast(enabled=False):
                self.seen.append((torch.is_autocast_enabled(), self.fc(y.float()).dtype))
            return self.norm(y)

    def train():
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.fc.weight.detach().clone()
        for _ in range(2):
            x = torch.randn(3, 4).to(DEVICE, non_blocking=True)
            optimizer.zero_grad()
            with CTX:
                loss = model(x).pow(2).mean() * torch.ones(1, device="cuda")
            SCALER.scale(loss.sum()).backward()
            SCALER.unscale_(optimizer)
            SCALER.step(optimizer)
            SCALER.update()
        torch.cuda.synchronize()
        return model, before
"""


def test_a_training_script(user_module):
    with emulate_cuda() as emulation, autocast_policy("cuda"):
        module = user_module(TRAINING)
        model, before = module.train()
        assert model.seen[:3] == [(True, True), HALF, (False, SINGLE)]
        assert model.norm.weight.grad.dtype is SINGLE
        assert not torch.equal(before, model.fc.weight)
        assert module.SCALER.get_scale() == 2048.0
        assert not torch.is_autocast_enabled("cpu")
    assert len(emulation.notes) == 1
    assert "stay on the CPU" in emulation.notes[0]


def test_the_default_dtype_is_cudas(user_module):
    with emulate_cuda():
        with torch.autocast("cuda"):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF
            assert torch.get_autocast_gpu_dtype() is HALF
            assert torch.get_autocast_dtype("cuda") is HALF
        with torch.autocast(device_type="cuda", dtype=BF16):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is BF16
            assert torch.get_autocast_dtype("cuda") is BF16
            with torch.autocast("cuda"):  # as on a GPU: the default is the dtype in force
                assert torch.get_autocast_dtype("cuda") is BF16
        assert torch.get_autocast_dtype("cuda") is HALF
        assert not torch.is_autocast_enabled()


CUSTOM = """
    import torch
    from torch.amp import custom_bwd, custom_fwd

    class Square(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.inside = (x.dtype, torch.is_autocast_enabled())
            Square.forward_saw = ctx.inside
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            Square.backward_saw = torch.is_autocast_enabled()
            return grad * 2 * ctx.saved_tensors[0]

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.cuda.amp.custom_fwd
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            out = a.mm(b)
            Product.forward_saw = out.dtype
            return out

        @staticmethod
        @torch.cuda.amp.custom_bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            Product.backward_saw = (torch.is_autocast_enabled(), grad.mm(b.t()).dtype)
            return grad.mm(b.t()).to(a.dtype), a.t().mm(grad).to(b.dtype)
"""


def test_custom_fwd_and_bwd(user_module):
    with emulate_cuda():
        module = user_module(CUSTOM)
        x = torch.rand(2, 2, requires_grad=True)
        with torch.autocast("cuda"):
            y = module.Square.apply(x.half())
            z = module.Product.apply(x, x)
        y.sum().backward()
        z.float().sum().backward()
    assert module.Square.forward_saw == (SINGLE, False)
    assert module.Square.backward_saw is False
    assert module.Product.forward_saw is HALF
    assert module.Product.backward_saw == (True, HALF)


@pytest.mark.parametrize("build", [torch.amp.GradScaler, torch.cuda.amp.GradScaler])
def test_a_scaler_continues_its_checkpoint(build):
    with emulate_cuda():
        scaler = build()
        state = {**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 3}
        scaler.load_state_dict(state)
        assert scaler.is_enabled()
        assert scaler.get_scale() == 8.0
        parameter = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(parameter * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 1.0
        assert scaler.get_scale() == 4.0
        assert not build(enabled=False).is_enabled()


def test_devices_stay_on_the_cpu():
    with emulate_cuda() as emulation:
        x = torch.ones(2)
        assert emulation.notes == ()
        moved = [
            *(x.cuda(), x.cuda(0), x.to("cuda"), x.to("cuda:1", HALF), x.to(device="cuda"), x.to(0)),
            *(
                torch.zeros(2, device="cuda"),
                torch.tensor([1.0], device=torch.device("cuda", 0)),
                torch.full((1,), 2, device=0),
            ),
            *(torch.zeros_like(x, device="cuda"), x.new_zeros(2, device="cuda"), torch.arange(3, device="cuda")),
            *(torch.empty(2, pin_memory=True), x.pin_memory(), torch.randn(2, 2, device="cuda", dtype=HALF)),
            torch.nn.Linear(2, 2).to("cuda", dtype=HALF).weight,
            torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        ]
        assert moved[3].dtype is HALF
        with torch.device("cuda"):
            moved.append(torch.rand(2))
        torch.set_default_device("cuda")
        moved.append(torch.rand(2))
        reset_default_device()
        generator = torch.Generator(device="cuda").manual_seed(0)
        assert isinstance(generator, torch.Generator)
        moved.append(torch.rand(2, generator=generator, device="cuda"))
        assert torch.utils.data.RandomSampler([1, 2], generator=torch.Generator()).generator is not None
        torch.cuda.set_device(0)
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(0):
            torch.cuda.empty_cache()
        assert torch.zeros(1, device="meta").device.type == "meta"
    assert {tensor.device.type for tensor in moved} == {"cpu"}
    assert len(emulation.notes) == 1


def test_names_bound_by_a_module_keep_working_inside_and_after(user_module):
    text = """
        from torch import autocast, zeros
        from torch.amp import GradScaler

        def build():
            return zeros(2, device="cuda"), GradScaler()

        half = autocast("cuda")
        """
    with emulate_cuda():
        module = user_module(text)
        tensor, scaler = module.build()
        assert scaler.is_enabled()
    assert tensor.device.type == "cpu"
    assert module.zeros(2).shape == (2,)
    with pytest.raises((RuntimeError, AssertionError)):
        module.zeros(2, device="cuda")
    with emulate_cuda():
        assert module.build()[1].is_enabled()
        with module.half:
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is HALF


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
def test_scripted_functions_compile():
    def grow(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(3) + torch.ones_like(x)

    with emulate_cuda():
        assert torch.equal(torch.jit.script(grow)(torch.ones(3)), torch.full((3,), 2.0))
