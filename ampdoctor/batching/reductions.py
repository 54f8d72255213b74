"""Who divides the gradients by the number of ranks, when, and what that costs if the reduce is in fp16."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.scaling.trace import Division


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceStack:
    """Frameworks that divide alike.

    Attributes:
        names: Which, and in which dtype they reduce.
        division: When they divide.
    """

    names: str
    division: Division


STACKS: tuple[ReduceStack, ...] = (
    ReduceStack(
        names="DDP with fp16 parameters or fp16_compress_hook, DeepSpeed ZeRO-1 to 3, Megatron-LM in fp16",
        division="before",
    ),
    ReduceStack(names="DeepSpeed ZeRO-0, and ZeRO-1 or 2 with reduce_scatter false", division="after"),
    ReduceStack(names="FSDP1 with a half reduce_dtype, FSDP2 with reduce_dtype=fp16", division="split"),
)
"""torch 2.13 (`reducer.cpp`, `default_hooks.py`, `_fsdp_collectives.py`), deepspeed 0.19.8 (`average_tensor`,
`allreduce_bucket`), Megatron-LM's `param_and_grad_buffer.py`. A reduce in fp32 loses nothing; DDP's and Megatron-LM's
are in the parameters' dtype, fp32 under autocast. FSDP2 reduces bf16 and fp32 by NCCL's AVG."""
