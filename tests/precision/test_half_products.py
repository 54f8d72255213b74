"""Half products through fp32 kernels: as near to the truth as the plain ones, the same origins, and seen by nobody."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ampdoctor.precision import fp16_matmul as module
from ampdoctor.precision.fp16_matmul import half_products

HALF = torch.float16
pytestmark = pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="no detour before torch 2.9")


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    products = {name: (multiplications, 0) for name, (multiplications, _) in module.PRODUCTS.items()}
    monkeypatch.setattr(module, "PRODUCTS", products)
    monkeypatch.setattr(module, "LEAST_ATTENTION", 0)


def values(kind, *shape):
    tensor = torch.randn(*shape, dtype=torch.float64)
    if kind == "huge":
        tensor *= 300.0  # sums of products beyond 65504
    elif kind == "tiny":
        tensor *= 2.0**-13  # products among the subnormals
    elif kind == "special":
        tensor.view(-1)[::7] = math.inf
        tensor.view(-1)[3::11] = -math.inf
        tensor.view(-1)[5::13] = math.nan
        tensor.view(-1)[1::5] = 0.0
    return tensor.to(HALF)


LARGEST = 65520.0
"""From here on a value rounds to infinity in half."""
KINDS = ("random", "huge", "tiny", "special")
SUMS = {
    "mm": (torch.mm, (7, 33), (33, 5)),
    "mm, long": (torch.mm, (3, 4096), (4096, 2)),
    "bmm": (torch.bmm, (3, 7, 33), (3, 33, 5)),
    "addmm": (lambda a, b: torch.addmm(a[:, :5], a, b, beta=0.5, alpha=2.0), (7, 33), (33, 5)),
    "baddbmm": (lambda a, b: torch.baddbmm(a[:, :, :5], a, b, beta=0.0), (3, 7, 33), (3, 33, 5)),
    "linear": (lambda a, b: functional.linear(a, b, b[:, 0].contiguous()), (2, 7, 33), (5, 33)),
    "conv1d": (lambda a, b: functional.conv1d(a, b, stride=2, padding=1), (2, 4, 19), (6, 4, 5)),
    "conv2d": (lambda a, b: functional.conv2d(a, b, padding=1, groups=2), (2, 4, 9, 9), (6, 2, 3, 3)),
    "conv2d, channels last": (
        lambda a, b: functional.conv2d(a.to(memory_format=torch.channels_last), b),
        (2, 4, 9, 9),
        (6, 4, 3, 3),
    ),
    "conv3d": (lambda a, b: functional.conv3d(a, b, stride=2), (1, 2, 6, 6, 6), (3, 2, 3, 3, 3)),
    "conv_transpose2d": (
        lambda a, b: functional.conv_transpose2d(a, b, stride=2, padding=1, groups=2),
        (2, 4, 6, 6),
        (4, 3, 3, 3),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUMS)
def test_within_half_an_ulp_of_the_truth(name, kind):
    """Half an ulp and the rounding of the fp32 sum, K x 2^-24 x sum |a||b|: what tensor cores promise as well."""
    call, *shapes = SUMS[name]
    a, b = (values(kind, *shape) for shape in shapes)
    with half_products():
        ours = call(a, b)
    wide = call(a.float(), b.float())  # as on CUDA; half kernels of CPUs without fp16 give up channels_last in 3d
    assert ours.dtype is HALF
    assert ours.shape == wide.shape
    assert ours.stride() == wide.stride()
    exact = call(a.double(), b.double())
    magnitudes = call(a.double().abs(), b.double().abs())
    length = max(a.shape[-1], b[0].numel()) + 1
    finite = torch.isfinite(ours)
    bound = _ulp(exact) / 2 + length * 2.0**-24 * magnitudes
    assert bool((ours.double() - exact).abs()[finite].le(bound[finite]).all())
    near = (exact.abs() - LARGEST).abs() <= bound  # where the bound itself leaves both open
    # not the plain kernels': a transposed one rounds its partial sums to half, and a CPU with fp16 skips inf * padding
    assert torch.equal(torch.isnan(ours), torch.isnan(exact))
    assert torch.equal(finite | near, torch.isfinite(exact.to(HALF)) | near)


def _ulp(exact):
    exponent = torch.frexp(exact)[1].clamp(min=-13)  # of the subnormals: 2^-24
    return torch.ldexp(torch.ones_like(exact), exponent - 11)


DIFFERENTIATED = ("mm", "bmm", "linear", "conv1d", "conv2d", "conv2d, channels last", "conv_transpose2d")


@pytest.mark.parametrize("kind", ["random", "huge", "tiny"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_as_near_as_the_plain_ones(name, kind):
    call, *shapes = SUMS[name]
    a, b = (values(kind, *shape) for shape in shapes)

    def gradients(dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (a, b)]
        result = call(*leaves)
        ones = torch.linspace(-1, 1, result.numel()).view(result.shape).to(HALF).to(dtype)
        return torch.autograd.grad(result, leaves, ones)

    plain = gradients(HALF)
    with half_products():
        ours = gradients(HALF)
    for own, other, wide, exact in zip(ours, plain, gradients(torch.float32), gradients(torch.float64), strict=True):
        assert own.stride() == wide.stride()
        assert torch.equal(torch.isfinite(own), torch.isfinite(other))
        finite = torch.isfinite(other)
        errors = [(one.double() - exact)[finite].norm() for one in (own, other)]
        assert errors[0] <= errors[1] * 1.01 + 2.0**-24 * exact[finite].norm()


MASKS = {
    "none": None,
    "causal": "causal",
    "boolean": lambda: torch.rand(2, 1, 40, 48) > 0.3,
    "of keys": lambda: torch.rand(2, 1, 1, 48) > 0.3,
    "additive": lambda: torch.zeros(40, 48, dtype=HALF).masked_fill(torch.rand(40, 48) > 0.5, -6e4),
    "a closed row": lambda: (torch.arange(40) != 5).unsqueeze(1).expand(40, 48),
}


def attended(dtype, mask, *, scale=1.0, heads=4, rows=40, columns=48):
    torch.manual_seed(1)

    def made(length, count):
        return (torch.randn(2, length, count, 16) * scale).to(HALF).to(dtype).transpose(1, 2)

    query, key, value = made(rows, 4), made(columns, heads), made(columns, heads)
    torch.manual_seed(2)
    chosen = mask() if callable(mask) else None
    if chosen is not None and chosen.dtype is HALF:
        chosen = chosen.to(dtype)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    result = functional.scaled_dot_product_attention(
        *leaves, attn_mask=chosen, is_causal=mask == "causal", enable_gqa=heads != 4
    )
    given = torch.linspace(-1, 1, result.numel()).view(result.shape).to(HALF).to(dtype)
    return result.detach(), *torch.autograd.grad(result, leaves, given)


@pytest.mark.parametrize(("mask", "heads"), [*((name, 4) for name in MASKS), ("causal", 2), ("boolean", 1)])
def test_attention_is_as_near_as_the_plain_one(mask, heads):
    plain = attended(HALF, MASKS[mask], heads=heads)
    with half_products():
        ours = attended(HALF, MASKS[mask], heads=heads)
    for own, other, exact in zip(ours, plain, attended(torch.float64, MASKS[mask], heads=heads), strict=True):
        assert own.stride() == other.stride()
        assert bool(torch.isfinite(own).all())
        errors = [(one.double() - exact).norm() for one in (own, other)]
        assert errors[0] <= errors[1] * 1.1


def test_attention_in_blocks_of_rows_is_the_same(monkeypatch):
    with half_products():
        whole = attended(HALF, "causal")
        monkeypatch.setattr(module, "SCORES", 2 * 4 * 48 * 7)
        parts = attended(HALF, "causal")
    assert all(torch.allclose(one, other, rtol=2e-3, atol=1e-5) for one, other in zip(whole, parts, strict=True))


@pytest.mark.parametrize("scale", [30.0, 100.0, 300.0])
def test_what_attention_rounds_inside_is_born_as_before(scale):
    """The gradient of the scores overflows in half between two products that would bring it back: with fp32 all through
    the backward would be finite."""
    plain = attended(HALF, "none", scale=scale)
    with half_products():
        ours = attended(HALF, "none", scale=scale)
    for own, other in zip(ours, plain, strict=True):
        assert torch.equal(torch.isfinite(own), torch.isfinite(other))


ORDERS = {
    "contiguous": (0, 1, 2, 3),
    "length before heads": (0, 2, 1, 3),
    "length first": (2, 0, 1, 3),
    "heads first": (1, 0, 2, 3),
}


@pytest.mark.parametrize(("heads", "width"), [(4, 16), (2, 16), (4, 8)])
@pytest.mark.parametrize("other", ["contiguous", "length before heads"])
@pytest.mark.parametrize("order", ORDERS)
def test_attention_is_laid_out_as_by_the_plain_kernel(order, other, heads, width):
    """A `view` that the plain kernel's result allows is allowed, and one that it refuses is refused."""

    def laid_out(name, *shape):
        stored = torch.randn([shape[axis] for axis in ORDERS[name]]).to(HALF)
        return stored.permute([ORDERS[name].index(axis) for axis in range(4)])

    tensors = [laid_out(order, 2, 4, 40, 16), laid_out(other, 2, heads, 48, 16), laid_out(other, 2, heads, 48, width)]

    def layouts(leaves):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        result = functional.scaled_dot_product_attention(*leaves, enable_gqa=heads != 4)
        return [tensor.stride() for tensor in (result, *torch.autograd.grad(result.sum(), leaves))]

    plain = layouts(tensors)
    with half_products() as region:
        assert layouts(tensors) == plain
        assert region.used == (width == 16)  # another width goes the way of fp32 matrices, op by op
        with FakeTensorMode() as mode:
            assert layouts([mode.from_tensor(tensor) for tensor in tensors]) == plain


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def test_whoever_traces_sees_the_program_and_no_detour():
    def traced():
        with Seen() as seen:
            weight = torch.randn(8, 8).half().requires_grad_()
            (functional.linear(torch.ones(4, 8, dtype=HALF), weight) @ weight).sum().backward()
            attended(HALF, "causal")
        return seen.names

    plain = traced()
    with half_products():
        assert traced() == plain


def test_second_derivatives_checkpoints_and_vmap():
    weight = torch.randn(6, 6).half()

    def loss(x):
        return (torch.tanh(x @ weight) @ weight).float().square().sum()

    def second(x):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), x)[0]

    def again(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)[0]

    x = torch.randn(5, 6).half() * 0.1
    for function in (second, again, torch.func.vmap(lambda row: weight @ row)):
        plain = function(x)
        with half_products():
            ours = function(x)
        assert torch.allclose(ours, plain, rtol=5e-3, atol=5e-3)


def test_regions_nest_and_the_last_one_brings_everything_back(monkeypatch):
    called = []
    monkeypatch.setattr(module, "narrowed", lambda value: called.append(value) or value.to(HALF))
    a = torch.randn(64, 256).half()
    plain = a @ a.t()
    with half_products():
        with half_products():
            inside = a @ a.t()
        assert torch.equal(a @ a.t(), inside)
    assert len(called) == 2
    assert torch.equal(a @ a.t(), plain)
    assert len(called) == 2
