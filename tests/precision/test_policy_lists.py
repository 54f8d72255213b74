"""The lists kept as data against the header and the registrations of the installed build."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ampdoctor.precision.emulation import policy_ops
from ampdoctor.precision.emulation.overlay import registered

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def header_list(name: str) -> set[str]:
    body = re.search(rf"#define {name}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)
    assert body is not None
    entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
    return {f"{op}.{overload}" if overload else op for op, overload in entries}


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", policy_ops.LOWER_PRECISION),
        ("AT_FORALL_FP32", policy_ops.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", policy_ops.FP32_SET_OPT_DTYPE),
        ("AT_FORALL_PROMOTE", policy_ops.PROMOTE),
    ],
)
def test_the_lists_are_the_headers(macro, ours):
    found = header_list(macro)
    assert len(found) > 5
    assert found == ours


def test_appended_dtype_is_the_headers():
    body = re.search(r"#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)
    assert body is not None
    assert set(re.findall(r'"([\w.]+)"', body.group(1))) == policy_ops.FP32_APPEND_DTYPE


def test_the_lists_cover_every_registration_for_cuda():
    assert registered("AutocastCUDA") == (policy_ops.ALL - policy_ops.RECURRENT) | policy_ops.CUDNN_ONLY


def test_what_stays_with_the_cpu_is_registered_there():
    assert registered("AutocastCPU") >= policy_ops.SAME_ON_CPU


def test_the_counts_of_the_design():
    added = policy_ops.ALL - policy_ops.RECURRENT - registered("AutocastCPU")
    lower = added & policy_ops.LOWER_PRECISION
    assert len(added - lower) == 63
    assert len(lower) == 15
    assert len(registered("AutocastCPU") - registered("AutocastCUDA")) == 88


def test_an_op_is_in_one_list_only():
    lists = [
        policy_ops.LOWER_PRECISION,
        policy_ops.RECURRENT,
        policy_ops.FP32,
        policy_ops.FP32_SET_OPT_DTYPE,
        policy_ops.FP32_APPEND_DTYPE,
        policy_ops.PROMOTE,
        policy_ops.BANNED,
    ]
    assert sum(len(each) for each in lists) == len(policy_ops.ALL)
