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

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


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


@pytest.mark.parametrize("name", cast_here(samples.LOWER))
def test_lower_precision(name):
    build = samples.LOWER[name]
    assert run(name, build, SINGLE, SINGLE) is HALF
    assert run(name, build, SINGLE, HALF) is HALF
    lower = HALF if name in kernels.RECURRENT else torch.bfloat16  # cuDNN's networks are cast to fp16 in any case
    assert run(name, build, SINGLE, SINGLE, lower=torch.bfloat16) is lower
    assert run(name, build, DOUBLE, DOUBLE) is DOUBLE


@pytest.mark.parametrize("name", cast_here(samples.FP32))
def test_fp32(name):
    build = samples.FP32[name]
    assert run(name, build, HALF, HALF) is SINGLE
    assert run(name, build, HALF, SINGLE) is SINGLE
    assert run(name, build, DOUBLE, DOUBLE) is DOUBLE


@pytest.mark.parametrize("name", cast_here(samples.OPTIONAL_DTYPE))
def test_an_explicit_dtype_wins(name):
    build = samples.OPTIONAL_DTYPE[name]
    assert run(name, build, HALF, HALF) is SINGLE
    assert run(name, build, SINGLE, SINGLE) is SINGLE
    assert run(name, build, DOUBLE, DOUBLE) is DOUBLE
    assert run(name, build, HALF, HALF, dtype=DOUBLE) is DOUBLE
    if "norm" not in name:  # a norm refuses a dtype narrower than its input
        assert run(name, build, SINGLE, SINGLE, dtype=HALF) is HALF


def test_an_explicit_dtype_given_by_position_wins():
    with autocast_policy("cuda"), torch.autocast("cpu", HALF):
        assert torch.ops.aten.softmax.int(torch.ones(2), 0, HALF).dtype is HALF
        assert torch.ops.aten.softmax.int(torch.ones(2, dtype=HALF), 0, None).dtype is SINGLE
        assert torch.arange(3).sum().dtype is torch.int64


@pytest.mark.parametrize("name", cast_here(samples.APPENDED_DTYPE))
def test_an_appended_dtype(name):
    build = samples.APPENDED_DTYPE[name]
    assert run(name, build, HALF, HALF) is SINGLE
    assert run(name, build, DOUBLE, DOUBLE) is DOUBLE


@pytest.mark.parametrize("name", cast_here(samples.PROMOTE))
def test_promotion(name):
    build = samples.PROMOTE[name]
    assert run(name, build, HALF, HALF) is HALF
    assert run(name, build, HALF, SINGLE) is SINGLE
    assert run(name, build, SINGLE, HALF) is SINGLE
    assert run(name, build, DOUBLE, DOUBLE) is DOUBLE
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        run(name, build, HALF, torch.bfloat16)


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
