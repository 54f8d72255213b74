"""The frameworks whose loss scalers ampdoctor knows."""

from __future__ import annotations

from typing import Literal, get_args

Framework = Literal["torch", "accelerate", "transformers", "lightning", "deepspeed", "megatron", "fairseq", "fsdp"]
"""`fsdp` is FSDP1's ShardedGradScaler; accelerate, transformers, lightning and fsdp use torch's rules."""

FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
