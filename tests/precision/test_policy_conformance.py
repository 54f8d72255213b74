"""Each op's output dtype under the policy, against what CUDA's policy says of its list."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ampdoctor.precision import kernels
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.kernels import cast_on_cuda, overload
from fixtures import op_samples as samples

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")  # torch, of chain_matmul and others

HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def maker(dtype):
    return lambda *shape: torch.rand(*shape).clamp(0.1, 0.9).to(dtype)


def run(name, build, first, second, lower=HALF, **kwargs):
    args = build(maker(first), maker(second))
    with autocast_policy("cuda"), torch.autocast("cpu", lower):
        out = overload(name)(*args, **kwargs)
    return (out if isinstance(out, torch.Tensor) else out[0]).dtype


def cast_here(ops):
    """Those that the installed build casts on CUDA; `test_policy_lists` holds the others to what is known to differ."""
    return sorted(cast_on_cuda() & ops.keys())


def test_every_op_of_the_policy_has_a_sample():
    assert set(samples.LOWER) == (kernels.LOWER_PRECISION | kernels.RECURRENT) - samples.NO_CPU_KERNEL
    assert set(samples.FP32) == kernels.FP32
    assert set(samples.OPTIONAL_DTYPE) == kernels.FP32_SET_OPT_DTYPE
    assert set(samples.APPENDED_DTYPE) == kernels.FP32_APPEND_DTYPE
    assert set(samples.PROMOTE) == kernels.PROMOTE
    assert set(samples.BANNED) == kernels.BANNED
    assert not set(samples.UNLISTED) & kernels.ALL


def rows():
    """For each op its sample, and with which inputs and arguments it gives which dtype."""
    kept = [(DOUBLE, DOUBLE, {}, DOUBLE)]
    upcast = [(HALF, HALF, {}, SINGLE), *kept]
    explicit = [(SINGLE, SINGLE, {}, SINGLE), (HALF, HALF, {"dtype": DOUBLE}, DOUBLE), *upcast]
    mixed = [(HALF, HALF, {}, HALF), (HALF, SINGLE, {}, SINGLE), (SINGLE, HALF, {}, SINGLE), *kept]
    for name in cast_here(samples.LOWER):
        lower = HALF if name in kernels.RECURRENT else BF16  # cuDNN's networks are cast to fp16 in any case
        own = [(SINGLE, SINGLE, {}, HALF), (SINGLE, HALF, {}, HALF), (SINGLE, SINGLE, {"lower": BF16}, lower), *kept]
        yield name, samples.LOWER[name], own
    yield from ((name, samples.FP32[name], [(HALF, SINGLE, {}, SINGLE), *upcast]) for name in cast_here(samples.FP32))
    for name in cast_here(samples.OPTIONAL_DTYPE):  # a norm refuses a dtype narrower than its input
        narrower = [] if "norm" in name else [(SINGLE, SINGLE, {"dtype": HALF}, HALF)]
        yield name, samples.OPTIONAL_DTYPE[name], explicit + narrower
    yield from ((name, samples.APPENDED_DTYPE[name], upcast) for name in cast_here(samples.APPENDED_DTYPE))
    yield from ((name, samples.PROMOTE[name], mixed) for name in cast_here(samples.PROMOTE))


@pytest.mark.parametrize(("name", "build", "expected"), [pytest.param(*row, id=row[0]) for row in rows()])
def test_each_op_computes_in_the_dtype_of_its_list(name, build, expected):
    for first, second, options, dtype in expected:
        assert run(name, build, first, second, **options) is dtype, (first, second, options)


@pytest.mark.parametrize("name", cast_here(samples.PROMOTE))
def test_promotion_refuses_two_half_formats(name):
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        run(name, samples.PROMOTE[name], HALF, BF16)


def test_an_explicit_dtype_given_by_position_wins():
    with autocast_policy("cuda"), torch.autocast("cpu", HALF):
        assert torch.ops.aten.softmax.int(torch.ones(2), 0, HALF).dtype is HALF
        assert torch.ops.aten.softmax.int(torch.ones(2, dtype=HALF), 0, None).dtype is SINGLE
        assert torch.arange(3).sum().dtype is torch.int64


def test_binary_cross_entropy_is_banned():
    p, t = torch.full((3,), 0.5), torch.ones(3)
    with autocast_policy("cuda"):
        with torch.autocast("cpu", HALF), pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(p, t)
        assert torch.nn.functional.binary_cross_entropy(p, t).dtype is SINGLE


def test_what_only_the_cpu_runs_in_fp32_stays_half():
    x = torch.rand(1, 1, 4, 4, 4, dtype=HALF)
    with torch.autocast("cpu", HALF):
        assert torch.nn.functional.max_pool3d(x, 2).dtype is SINGLE
    with autocast_policy("cuda"), torch.autocast("cpu", HALF):
        assert torch.nn.functional.max_pool3d(x, 2).dtype is HALF
        assert torch.nn.functional.pad(x[0, 0], (1, 1), mode="reflect").dtype is HALF
        with contextlib.suppress(RuntimeError):  # an older CPU has no half kernel for it, and none is lent
            assert torch.trace(x[0, 0, 0]).dtype is HALF


def test_on_neither_list_follows_its_inputs():
    x = torch.rand(4, 4, dtype=HALF)
    with autocast_policy("cuda"), torch.autocast("cpu", HALF):
        for fn in (torch.mean, torch.std, torch.sqrt, torch.nn.functional.gelu, torch.relu, torch.sigmoid):
            assert fn(x).dtype is HALF
