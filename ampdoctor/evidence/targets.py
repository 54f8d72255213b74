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
    """One kind of hardware; `source` is where its row comes from.

    `bf16` means matrix products run natively; if it is emulated, torch reports support, but it gains nothing.
    `fp16_flush` is log2 of the magnitude below which an operand of a forward product in fp16 becomes zero.
    `bf16_backward` says that torch computes the backward's fp16 products through bf16, with its 8 bits.
    """

    name: str
    hardware: str  # in words
    fp16: bool = True  # native matrix products
    bf16: bool = True
    tf32: bool = False  # fp32 matrix products may read 10 mantissa bits
    fp8: bool = False  # E4M3 and E5M2 with a scale for each tensor
    mxfp8: bool = False  # a power-of-two scale for each 32 elements
    fp16_flush: float = FP16_FLUSH
    bf16_backward: bool = False
    source: str

    @property
    def flushes_subnormals(self) -> bool:
        """True if its forward products treat fp16's subnormal operands as zero."""
        return self.fp16_flush > FP16_FLUSH


_TENSOR_CORES = "tensor cores keep fp16 subnormals (Fasi et al., PeerJ CS 7:e330)"
_MATRIX = "NVIDIA Transformer Engine's datatype and hardware support matrix"

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            Target(
                name="v100",
                hardware="NVIDIA V100 (compute capability 7.0)",
                bf16=False,
                source=f"{_MATRIX}: bf16 from 8.0 on; {_TENSOR_CORES}",
            ),
            Target(
                name="t4",
                hardware="NVIDIA T4 (compute capability 7.5)",
                bf16=False,
                source=f"{_MATRIX}: bf16 from 8.0 on; {_TENSOR_CORES}",
            ),
            Target(
                name="a100",
                hardware="NVIDIA A100 (compute capability 8.0)",
                tf32=True,
                source=f"{_MATRIX}: no FP8 before 8.9; {_TENSOR_CORES}",
            ),
            Target(
                name="l4",
                hardware="NVIDIA L4, L40S (compute capability 8.9)",
                tf32=True,
                fp8=True,
                source=f"{_MATRIX}: FP8 per tensor, no block scaling",
            ),
            Target(
                name="h100",
                hardware="NVIDIA H100, H200 (compute capability 9.0)",
                tf32=True,
                fp8=True,
                source=f"{_MATRIX}: FP8 per tensor, no MXFP8; fp16 subnormals taken as on the A100, not measured",
            ),
            Target(
                name="b200",
                hardware="NVIDIA B200, GB200, B300 (compute capability 10.0, 10.3)",
                tf32=True,
                fp8=True,
                mxfp8=True,
                source=f"{_MATRIX}: MXFP8; fp16 subnormals taken as on the A100, not measured",
            ),
            Target(
                name="gtx10",
                hardware="NVIDIA GTX 10, Pascal without tensor cores (compute capability 6.1)",
                fp16=False,
                bf16=False,
                source="CUDA C++ Programming Guide, arithmetic instructions: fp16 at 1/64 of fp32's throughput at 6.1",
            ),
            Target(
                name="gtx16",
                hardware="NVIDIA GTX 16, Turing without tensor cores (compute capability 7.5)",
                bf16=False,
                source="NVIDIA's Turing whitepaper: TU116 has fp16 units at twice fp32's rate in place of tensor cores",
            ),
            Target(
                name="rtx20",
                hardware="NVIDIA RTX 20, Titan RTX (compute capability 7.5)",
                bf16=False,
                source=f"{_MATRIX}: bf16 from 8.0 on; {_TENSOR_CORES}",
            ),
            Target(
                name="rtx30",
                hardware="NVIDIA RTX 30 (compute capability 8.6)",
                tf32=True,
                source=f"{_MATRIX}: no FP8 before 8.9; fp16 subnormals taken as on the A100, not measured",
            ),
            Target(
                name="rtx40",
                hardware="NVIDIA RTX 40 (compute capability 8.9)",
                tf32=True,
                fp8=True,
                source=f"{_MATRIX}: FP8 per tensor, no block scaling",
            ),
            Target(
                name="rtx50",
                hardware="NVIDIA RTX 50 (compute capability 12.0)",
                tf32=True,
                fp8=True,
                source=f"{_MATRIX}: no MXFP8 on 12.0; fp16 subnormals taken as on the A100",
            ),
            Target(
                name="mi200",
                hardware="AMD Instinct MI210, MI250, MI250X (CDNA2, gfx90a)",
                fp16_flush=-14.0,
                bf16_backward=True,
                source="PyTorch's notes on numerical accuracy and MIOpen's on MI200: MFMA flushes fp16 subnormals; the "
                "alternate implementation through bf16 is off in the forward and on in the backward",
            ),
            Target(
                name="cpu",
                hardware="a CPU with AVX512_BF16, AMX or Arm's BF16 extension",
                fp16=False,
                source="PyTorch's notes on bfloat16 on Xeon; fp16 products are converted to fp32 before AMX-FP16, and "
                "torch's CPU autocast takes bfloat16 by default",
            ),
        )
    }
)


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

Framework = Literal["torch", "accelerate", "transformers", "lightning", "deepspeed", "megatron", "fsdp"]
"""`fsdp` is FSDP1's ShardedGradScaler; accelerate, transformers, lightning and fsdp use torch's rules."""

FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)

PlanFramework = Literal["transformers", "accelerate", "lightning", "deepspeed", "megatron", "torchtitan", "torchrun"]
"""Frameworks for which a batch plan can be written; `torchrun` is a user's own loop."""

PLAN_FRAMEWORKS: tuple[PlanFramework, ...] = get_args(PlanFramework)
