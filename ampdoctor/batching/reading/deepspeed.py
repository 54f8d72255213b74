"""A DeepSpeed configuration, as read in deepspeed 0.19.8 (`runtime/config.py`, `runtime/engine.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ampdoctor.batching.reading.counts import count, shown, table_in, word
from ampdoctor.batching.settings import BatchSettings, Precision
from ampdoctor.errors import UsageError
from ampdoctor.scaling.shifts import Division

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
"""One of them stands in every DeepSpeed configuration, and in no other framework's."""


def deepspeed(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what the configuration says; as there, any two of the three sizes say the third.

    Raises:
        UsageError: A number that is none, or a ZeRO stage that there is not.
    """
    stage = table_in(table, "zero_optimization", name).get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UsageError(f"{name}: zero_optimization.stage is 0, 1, 2 or 3, not {shown(stage)}")
    halves: tuple[Precision, ...] = tuple(
        half for half in ("fp16", "bf16") if table_in(table, half, name).get("enabled")
    )
    batch = count(table, "train_batch_size", name)
    micro = count(table, "train_micro_batch_size_per_gpu", name)
    steps = count(table, "gradient_accumulation_steps", name)
    if batch is None or micro is None:
        steps = steps or 1  # what DeepSpeed itself takes where only one size is said
    notes = []
    if table_in(table, "elasticity", name).get("enabled"):
        notes.append("elasticity is enabled: DeepSpeed then chooses the global batch itself.")
    return BatchSettings(
        framework="deepspeed",
        global_batch=batch,
        micro_batch=micro,
        accumulation=steps,
        tensor=count(table_in(table, "tensor_parallel", name), "autotp_size", name),
        shard_stage=stage,
        precision=halves[0] if halves else "fp32",
        division=_division(table, stage, name) if halves == ("fp16",) else "none",
        notes=tuple(notes),
    )


def _division(table: Mapping[str, Any], stage: int, name: str) -> Division | Literal["none"]:
    if word(table, "communication_data_type", "fp16") != "fp16":
        return "none"
    scattered = table_in(table, "zero_optimization", name).get("reduce_scatter", True)
    if stage == 3 or (stage and scattered) or table.get("prescale_gradients"):
        return "before"
    return "after"
