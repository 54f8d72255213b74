"""The hardware behind `--target`, and the frameworks for which advice is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from ampdoctor.errors import UsageError

DEFAULT_TARGET = "a100"
"""The oldest hardware with everything but FP8: what holds there holds on all later hardware."""
FP16_FLUSH = -25.0
"""log2 of the magnitude up to which IEEE fp16 rounds to zero, subnormals kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of hardware.

    `bf16` means matrix products run natively; if it is emulated, torch reports support, but it gains nothing.
    `fp16_flush` is log2 of the magnitude below which an operand of a forward product in fp16 becomes zero.
    `bf16_backward` says that torch computes the backward's fp16 products through bf16, with its 8 bits.
    """

    name: str
    fp16: bool = True  # native matrix products
    bf16: bool = True
    tf32: bool = False  # fp32 matrix products may read 10 mantissa bits
    fp8: bool = False  # E4M3 and E5M2 with a scale for each tensor
    mxfp8: bool = False  # a power-of-two scale for each 32 elements
    fp16_flush: float = FP16_FLUSH
    bf16_backward: bool = False

    @property
    def flushes_subnormals(self) -> bool:
        """True if its forward products treat fp16's subnormal operands as zero."""
        return self.fp16_flush > FP16_FLUSH


# Sources: NVIDIA Transformer Engine's datatype and hardware support matrix (bf16 from 8.0 on, FP8 from 8.9, MXFP8
# from 10.0, but not on 12.0). Tensor cores keep fp16 subnormals (Fasi et al., PeerJ CS 7:e330: V100 to A100;
# later ones taken as on the A100, not measured).
_ROWS = (
    Target(name="v100", bf16=False),  # compute capability 7.0
    Target(name="t4", bf16=False),  # 7.5
    Target(name="a100", tf32=True),  # 8.0
    Target(name="l4", tf32=True, fp8=True),  # and L40S: 8.9
    Target(name="h100", tf32=True, fp8=True),  # and H200: 9.0
    Target(name="b200", tf32=True, fp8=True, mxfp8=True),  # and GB200, B300: 10.0, 10.3
    # Pascal without tensor cores, 6.1: fp16 at 1/64 of fp32's throughput (CUDA C++ Programming Guide)
    Target(name="gtx10", fp16=False, bf16=False),
    # Turing without tensor cores, 7.5: fp16 units at twice fp32's rate (NVIDIA's Turing whitepaper: TU116)
    Target(name="gtx16", bf16=False),
    Target(name="rtx20", bf16=False),  # and Titan RTX: 7.5
    Target(name="rtx30", tf32=True),  # 8.6
    Target(name="rtx40", tf32=True, fp8=True),  # 8.9
    Target(name="rtx50", tf32=True, fp8=True),  # 12.0
    # AMD MI210, MI250 (CDNA2): MFMA flushes fp16 subnormals; the alternate implementation through bf16 is off in the
    # forward and on in the backward (PyTorch's notes on numerical accuracy, MIOpen's on MI200)
    Target(name="mi200", fp16_flush=-14.0, bf16_backward=True),
    # AVX512_BF16, AMX or Arm's BF16 extension; fp16 products are converted to fp32 before AMX-FP16, and torch's CPU
    # autocast takes bfloat16 by default (PyTorch's notes on bfloat16 on Xeon)
    Target(name="cpu", fp16=False),
)
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _ROWS})

_CARD = re.compile(r"(?:geforce)?(rtx|gtx)(\d\d)\d\d(?:ti|super|d|laptop|mobile|maxq)*")
"""One card of a family: its first two figures are the family's."""


def target_named(name: str) -> Target:
    """Returns the row of a target; for a consumer's card ("rtx3090", "RTX 4070 Ti") that of its family.

    Raises UsageError if no row has this name.
    """
    plain = re.sub(r"[\s_-]", "", name.lower())
    card = _CARD.fullmatch(plain)
    found = TARGETS.get(card[1] + card[2] if card else plain)
    if found is None:
        raise UsageError(f"unknown target {name!r}; known are {', '.join(TARGETS)}")
    return found


# -- frameworks --

Framework = Literal["torch", "accelerate", "transformers", "lightning", "deepspeed", "megatron"]
"""accelerate, transformers and lightning use torch's rules."""

FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)

PlanFramework = Literal["transformers", "accelerate", "lightning", "deepspeed", "megatron", "torchtitan"]
"""Frameworks for which a batch plan can be written."""
