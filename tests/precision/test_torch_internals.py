"""What stands in for `torch.library.get_kernel`: on every torch it gives what the kernel itself gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ampdoctor.precision import kernels
from ampdoctor.precision.cuda_autocast import COMPOSITES, LEAVES, autocast_policy
from ampdoctor.precision.spec import OPERANDS, tf32, torch_shims

HALF = torch.float16
IMAGE = (1, 2, 6, 6)
VOLUME = (1, 2, 4, 4, 4)


@pytest.fixture
def without_get_kernel(monkeypatch):
    """As on a torch before 2.9."""
    monkeypatch.delattr(torch.library, "get_kernel", raising=False)


CALLS = {
    "avg_pool3d": (VOLUME, lambda x: functional.avg_pool3d(x, 2)),
    "upsample": (IMAGE, lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear", antialias=True)),
    "fft": (IMAGE, lambda x: torch.fft.fft2(x).real),
    "rfft": (IMAGE, lambda x: torch.fft.irfft(torch.fft.rfft(x))),
}


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_half_kernel_that_is_lent(call, dtype, without_get_kernel):
    shape, run = CALLS[call]
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.4).to(dtype)
    wide = x.float().requires_grad_()
    expected = run(wide)
    expected.square().sum().backward()
    x.requires_grad_()
    with autocast_policy("cuda"):
        y = run(x)
        y.float().square().sum().backward()
    assert y.dtype is dtype
    rounding = {"rtol": 2e-3, "atol": 2e-3} if dtype is HALF else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(y.float(), expected, **rounding)
    if dtype is HALF:  # each output that the gradient sums is rounded first: up to 2 x sum |y| x 2^-12
        rounding["atol"] += 2 * expected.abs().sum().item() * 2.0**-12
    torch.testing.assert_close(x.grad.float(), wide.grad, **rounding)


def test_each_kernel_has_a_stand_in_but_the_fused_recurrent_layer(without_get_kernel):
    lacking = [name for name in (*LEAVES, *COMPOSITES, *OPERANDS) if kernels.kernel_of(name, "CPU") is None]
    assert lacking == ["mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"]


@pytest.mark.parametrize(
    ("shapes", "run"),
    [
        (((4, 8), (8, 3)), torch.mm),
        (((5,), (4, 8), (8, 5)), torch.addmm),
        (((2, 4, 8), (2, 8, 3)), torch.bmm),
        (((2, 3, 6, 6), (4, 3, 3, 3)), functional.conv2d),
        (((2, 3, 6), (3, 4, 3)), functional.conv_transpose1d),
    ],
)
def test_tf32_without_get_kernel(shapes, run, monkeypatch):
    def products():
        inputs = [torch.rand(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
        for tensor in inputs:
            tensor.requires_grad_()
        with tf32():
            result = run(*inputs)
            result.square().sum().backward()
        return [result.detach(), *(tensor.grad for tensor in inputs)]

    as_installed = products()
    monkeypatch.delattr(torch.library, "get_kernel", raising=False)
    for here, there in zip(products(), as_installed, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)


def test_what_differs_is_named_with_a_sentence(without_get_kernel):
    shims = torch_shims()
    assert "kernels-by-overload" in shims
    assert all(sentence.endswith((".", ").")) for sentence in shims.values())


def test_a_cast_that_is_not_known_is_named(monkeypatch):
    here = kernels.registered
    monkeypatch.setattr(kernels, "registered", lambda key: here(key) | {"brand_new_op"})
    assert "brand_new_op" in torch_shims()["unknown-cuda-casts"]
