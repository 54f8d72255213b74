"""A DeepSpeed configuration, as read in deepspeed 0.19.8 (`runtime/config.py`, `runtime/engine.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ampdoctor.batching.reading.counts import count, half_of, table_in, word, yes
from ampdoctor.batching.reading.sharding import ULYSSES, zero_stage
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.errors import UsageError
from ampdoctor.scaling.trace import Division

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
"""One of them stands in every DeepSpeed configuration, and in no other framework's."""
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def deepspeed(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what the configuration says; as there, any two of the three sizes say the third.

    Raises:
        UsageError: A number that is none, a ZeRO stage that there is not, or a batch that DeepSpeed chooses.
    """
    if yes(table_in(table, "elasticity", name), "enabled", name):
        raise UsageError(
            f"{name}: elasticity is enabled: DeepSpeed chooses the batch itself, and there is none to keep"
        )
    stage = zero_stage(table_in(table, "zero_optimization", name), "stage", f"{name}: zero_optimization") or 0
    fp16, bf16 = (yes(table_in(table, half, name), "enabled", name) for half in ("fp16", "bf16"))
    batch = count(table, "train_batch_size", name)
    micro = count(table, "train_micro_batch_size_per_gpu", name)
    steps = count(table, "gradient_accumulation_steps", name)
    filled = [key for key in _SIZES if table.get(key) == "auto"]
    if steps is None and not filled and (batch is None or micro is None):
        steps = 1  # what DeepSpeed itself takes where only one size is said
    notes = []
    if filled:
        notes.append(f"auto: Trainer or Accelerate fills in {', '.join(filled)}, and here the command line does.")
    if fp16 is None or bf16 is None:
        notes.append("auto: whether it is fp16 or bf16 stands in Trainer's arguments, and --precision says it.")
    sequence = count(table, "sequence_parallel_size", name)
    if sequence is not None and sequence > 1:
        notes.append(ULYSSES)
    return BatchSettings(
        framework="deepspeed",
        global_batch=batch,
        micro_batch=micro,
        accumulation=steps,
        tensor=count(table_in(table, "tensor_parallel", name), "autotp_size", name),
        context=sequence,
        shard_stage=stage,
        precision=half_of(name, fp16=fp16, bf16=bf16),
        division="none" if fp16 is False else _division(table, stage, name),
        filled=bool(filled),
        notes=tuple(notes),
    )


def _division(table: Mapping[str, Any], stage: int, name: str) -> Division | Literal["none"]:
    if word(table, "communication_data_type", "fp16") != "fp16":
        return "none"
    scattered = table_in(table, "zero_optimization", name).get("reduce_scatter", True)
    if stage == 3 or (stage and scattered) or table.get("prescale_gradients"):
        return "before"
    return "after"
