"""The lists kept as data against the header and the registrations of the installed build."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ampdoctor.precision import kernels as policy_ops
from ampdoctor.precision.cuda_autocast import WeightCache, policy_kernels
from ampdoctor.precision.kernels import cast_on_cuda, registered

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def header_list(name: str) -> set[str]:
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
    return {f"{op}.{overload}" if overload else op for op, overload in entries}


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", policy_ops.LOWER_PRECISION),
        ("AT_FORALL_FP32", policy_ops.FP32 - policy_ops.LATER),  # registered beside the lists
        ("AT_FORALL_FP32_SET_OPT_DTYPE", policy_ops.FP32_SET_OPT_DTYPE),
        ("AT_FORALL_PROMOTE", policy_ops.PROMOTE),
    ],
)
def test_the_lists_are_the_headers(macro, ours):
    found = header_list(macro)
    assert len(found) > 5
    assert found - policy_ops.NAMED == ours & cast_on_cuda()


def test_appended_dtype_is_the_headers():
    body = re.search(r"#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert (
        set(re.findall(r'"([\w.]+)"', body.group(1))) - policy_ops.NAMED
        == policy_ops.FP32_APPEND_DTYPE & cast_on_cuda()
    )


def test_the_lists_cover_every_registration_for_cuda():
    on_cuda = registered("AutocastCUDA")
    assert on_cuda - policy_ops.CUDNN_ONLY - policy_ops.NAMED == cast_on_cuda() - policy_ops.RECURRENT


def test_what_some_versions_do_not_cast_is_known():
    assert policy_ops.ALL - cast_on_cuda() <= policy_ops.LATER | {"rms_norm"}


def test_the_cpus_key_gets_all_that_cuda_casts_and_loses_all_else():
    kernels = {kernel.op: kernel.fn for kernel in policy_kernels(WeightCache())}
    skipped = {op for op, fn in kernels.items() if fn is torch.library.fallthrough_kernel}
    assert kernels.keys() - skipped == cast_on_cuda() - policy_ops.SAME_ON_CPU
    assert skipped == registered("AutocastCPU") - cast_on_cuda()
    assert len(kernels.keys() - skipped) > 80
    assert len(skipped) > 60
