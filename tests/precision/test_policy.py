"""Entering and leaving the policy, its gradients, its weight cache and the half kernels it lends."""

from __future__ import annotations

import threading

import pytest
import torch

from ampdoctor.errors import UsageError
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.kernels import registered

HALF = torch.float16
CPU_OWN = registered("AutocastCPU")
X = torch.rand(4, 4).to(HALF)


def exp_dtype():
    with torch.autocast("cpu", HALF):
        return torch.exp(X).dtype


def pool_dtype():
    with torch.autocast("cpu", HALF):
        return torch.nn.functional.max_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=HALF), 2).dtype


def assert_native():
    assert exp_dtype() is HALF
    assert pool_dtype() is torch.float32
    assert registered("AutocastCPU") == CPU_OWN
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        torch.nn.functional.avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=HALF), 2)
    with torch.autocast("cpu", HALF):
        assert torch.nn.functional.binary_cross_entropy(torch.ones(2), torch.ones(2)).item() == 0
    assert torch.clear_autocast_cache.__module__ != "ampdoctor.precision.cuda_autocast"


def test_the_cpus_own_policy_is_back():
    assert_native()
    with autocast_policy("cuda"):
        assert exp_dtype() is torch.float32
        assert registered("AutocastCPU") != CPU_OWN
    assert_native()


def test_nested():
    with autocast_policy("cuda"):
        with autocast_policy("cuda"):
            assert exp_dtype() is torch.float32
        assert exp_dtype() is torch.float32
        with autocast_policy("native"):
            assert_native()
        assert exp_dtype() is torch.float32
    assert_native()


def test_two_threads_that_overlap():
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with autocast_policy("cuda"):
            inside.set()
            leave.wait(10)
            seen.append(exp_dtype())
        seen.append(exp_dtype())

    with autocast_policy("cuda"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
    assert exp_dtype() is torch.float32  # the other thread is still inside
    leave.set()
    thread.join()
    assert seen == [torch.float32, HALF]
    assert_native()


def test_outside_autocast_nothing_is_cast():
    with autocast_policy("cuda"):
        assert torch.exp(X).dtype is HALF
        with torch.autocast("cpu", HALF), torch.autocast("cpu", enabled=False):
            assert torch.exp(X).dtype is HALF


def test_an_unknown_policy():
    with pytest.raises(UsageError, match="'rocm'"), autocast_policy("rocm"):
        pass


def half_casts(region):
    """How many times a leaf weight is cast to half: the nodes that hang on its gradient accumulator."""
    cell = torch.nn.RNNCell(3, 3, bias=False)
    hidden = region(cell)
    found = set()
    todo = [hidden.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for parent, _ in node.next_functions:
            if getattr(parent, "variable", None) is cell.weight_hh:
                found.add(node)
            todo.append(parent)
    return len(found)


def test_a_weight_is_cast_once_in_an_autocast_region():
    x = torch.rand(2, 3)

    def once(cell):
        with torch.autocast("cpu", HALF):
            return cell(x, cell(x, cell(x)))

    def without_cache(cell):
        with torch.autocast("cpu", HALF, cache_enabled=False):
            return cell(x, cell(x, cell(x)))

    def two_regions(cell):
        with torch.autocast("cpu", HALF):
            hidden = cell(x)
        with torch.autocast("cpu", HALF):
            return cell(x, hidden)

    with autocast_policy("cuda"):
        assert half_casts(once) == 1
        assert half_casts(without_cache) == 3
        assert half_casts(two_regions) == 2


def names(policy):
    return [note.partition(" ")[0] for note in policy.notes]


@pytest.mark.parametrize("autocast", [True, False])
def test_a_missing_half_kernel_runs_in_fp32_and_is_rounded(autocast):
    x = torch.rand(1, 2, 4, 4, 4).to(HALF).requires_grad_()
    wide = x.detach().float().requires_grad_()
    with autocast_policy("cuda") as policy, torch.autocast("cpu", HALF, enabled=autocast):
        y = torch.nn.functional.avg_pool3d(x, 2)
        y.sum().backward()
    expected = torch.nn.functional.avg_pool3d(wide, 2)
    expected.sum().backward()
    assert torch.equal(y, expected.to(HALF))
    assert torch.equal(x.grad, wide.grad.to(HALF))
    assert names(policy) == ["aten.avg_pool3d", "aten.avg_pool3d_backward"]
    assert "aten.avg_pool3d has no half kernel" in policy.notes[0]


@pytest.mark.parametrize("autocast", [True, False])
def test_fft_of_half(autocast):
    x = torch.rand(8).to(HALF).requires_grad_()
    with autocast_policy("cuda") as policy, torch.autocast("cpu", HALF, enabled=autocast):
        y = torch.fft.irfft(torch.fft.rfft(x), n=8)
        y.sum().backward()
    assert y.dtype is x.grad.dtype is HALF
    torch.testing.assert_close(y, x, rtol=0.01, atol=0.01)
    torch.testing.assert_close(x.grad, torch.ones(8, dtype=HALF), rtol=0.01, atol=0.01)
    assert "aten.fft_rfft" in names(policy)
    with autocast_policy("cuda") as policy, torch.no_grad():
        assert torch.fft.rfft(x).dtype is torch.complex32
        assert torch.fft.rfft(x.float()).dtype is torch.complex64
    assert names(policy) == ["aten.fft_rfft"]


def test_what_cuda_lacks_too_still_raises():
    with autocast_policy("cuda"), pytest.raises(RuntimeError, match="Half"):
        torch.cdist(X, X)
