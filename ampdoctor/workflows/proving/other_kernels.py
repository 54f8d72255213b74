"""Other kernels for the same arithmetic: tried first where a kernel is at fault, as nothing else of the run changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Birth
    from ampdoctor.evidence.report import Prescription
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.proving.trials import Trials

AROUND = "a way around, which runs another kernel and proves no cause"
"""What is said of another format where a kernel is at fault."""


def other_kernels(birth: Birth, trials: Trials, session: Session) -> Iterator[Prescription]:
    """Try the kernels that torch has beside the one at fault, on the device of the replay.

    Args:
        birth: The culprit.
        trials: The trials of its step.
        session: The session.
    """
    foreign = not birth.kernel.startswith("aten.")  # a library's operator may stand behind any of torch's functions
    if foreign or "attention" in birth.kernel or "attention" in (birth.where.op or ""):
        words = "torch's own attention: with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): around the step"
        yield trials.attempt("code", words, _attention, words, stands_in=True)
    if session.device.type == "cuda":
        words = "cuDNN off: torch.backends.cudnn.enabled = False"
        yield trials.attempt("code", words, _without_cudnn, words, stands_in=True)
    elif torch.backends.mkldnn.is_available():
        words = "oneDNN off: torch.backends.mkldnn.enabled = False"
        yield trials.attempt("code", words, _without_onednn, words, stands_in=True)


def around(tried: Iterator[Prescription]) -> Iterator[Prescription]:
    """Yields the same attempts, each named as a way around."""
    for one in tried:
        yield replace(one, detail=f"{one.detail.removesuffix('.')} ({AROUND})")


@contextmanager
def _attention(session: Session) -> Iterator[None]:  # noqa: ARG001 - the seam's signature
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _without_cudnn(session: Session) -> AbstractContextManager[Any]:  # noqa: ARG001 - the seam's signature
    flags: AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=False)
    return flags


@contextmanager
def _without_onednn(session: Session) -> Iterator[None]:  # noqa: ARG001 - the seam's signature
    before = torch.backends.mkldnn.set_flags(False)[0]  # `flags` also sets what only Intel's GPUs have, and warns
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)
