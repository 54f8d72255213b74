"""The frameworks whose loss scalers ampdoctor knows."""

from __future__ import annotations

from typing import Literal, get_args

Framework = Literal["torch", "accelerate", "transformers", "lightning", "deepspeed", "megatron", "fairseq", "fsdp"]
"""`fsdp` is FSDP1's ShardedGradScaler; accelerate, transformers, lightning and fsdp use torch's rules."""

FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)

PlanFramework = Literal["transformers", "accelerate", "lightning", "deepspeed", "megatron", "torchtitan", "torchrun"]
"""Those in whose words a plan of the batch can be said; `torchrun` is a user's own loop."""

PLAN_FRAMEWORKS: tuple[PlanFramework, ...] = get_args(PlanFramework)
