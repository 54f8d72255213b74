"""Trainer arguments of transformers, and a configuration of Accelerate.

Read in transformers 5.23 (`training_args.py`) and accelerate 1.15 (`commands/config/config_args.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ampdoctor.batching.reading.counts import count, table_in, word
from ampdoctor.batching.settings import BatchSettings, Precision
from ampdoctor.errors import UsageError
from ampdoctor.scaling.shifts import Division

_TOKENS = (
    "Trainer divides by the step's tokens only if the model takes num_items_in_batch or compute_loss_func is given; "
    "elsewhere it takes the mean of each micro-batch."
)
_SHARDS = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3}


def trainer_arguments(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what `TrainingArguments` say; what they leave out has the library's default.

    Raises:
        UsageError: A number that is none, or a batch that DeepSpeed's own file says.
    """
    precision: Precision = "fp16" if table.get("fp16") else "bf16" if table.get("bf16") else "fp32"
    notes = [_TOKENS]
    if table.get("auto_find_batch_size"):
        notes.append("auto_find_batch_size: Trainer takes a smaller micro-batch where memory runs out, on its own.")
    if table.get("deepspeed"):
        notes.append("deepspeed: the sizes in its configuration have to be these, or auto.")
    fsdp = table.get("fsdp")
    return BatchSettings(
        framework="transformers",
        micro_batch=count(table, "per_device_train_batch_size", name) or 8,
        accumulation=count(table, "gradient_accumulation_steps", name) or 1,
        shard_stage=_stage(fsdp),
        precision=precision,
        reduction="tokens",
        division=_division(precision, sharded=bool(fsdp), elsewhere=bool(table.get("deepspeed"))),
        notes=tuple(notes),
    )


def accelerate(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what `accelerate config` has written; the micro-batch is the data loader's, and stands elsewhere.

    Raises:
        UsageError: A number that is none.
    """
    deepspeed = table_in(table, "deepspeed_config", name)
    fsdp = table_in(table, "fsdp_config", name)
    megatron = table_in(table, "megatron_lm_config", name)
    parallel = table_in(table, "parallelism_config", name)
    mixed = word(table, "mixed_precision", "no")
    if mixed not in ("no", "fp16", "bf16", "fp8"):
        raise UsageError(f"{name}: mixed_precision is no, fp16, bf16 or fp8, not {mixed}")
    precision: Precision = {"fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}.get(mixed, "fp32")  # type: ignore[assignment]
    stage = deepspeed.get("zero_stage")
    sharding = word(fsdp, "fsdp_sharding_strategy", "full_shard") if fsdp else ""
    return BatchSettings(
        framework="accelerate",
        devices=count(table, "num_processes", name),
        accumulation=count(deepspeed, "gradient_accumulation_steps", name),
        tensor=count(megatron, "megatron_lm_tp_degree", name) or count(parallel, "parallelism_config_tp_size", name),
        pipeline=count(megatron, "megatron_lm_pp_degree", name),
        context=count(parallel, "parallelism_config_cp_size", name),
        shard_stage=stage if isinstance(stage, int) else _SHARDS.get(sharding),
        precision=precision,
        division=_division(precision, sharded=bool(fsdp), elsewhere=bool(deepspeed or megatron)),
        notes=("An Accelerate configuration does not say the data loader's batch: --micro-batch does.",),
    )


def _division(precision: Precision, *, sharded: bool, elsewhere: bool) -> Division | Literal["none"] | None:
    """Under autocast DDP reduces the fp32 gradients of fp32 parameters; FSDP in its mixed precision's dtype."""
    if precision != "fp16":
        return "none"
    return None if elsewhere else "split" if sharded else "none"


def _stage(fsdp: Any) -> int | None:
    words = fsdp if isinstance(fsdp, list) else fsdp.split() if isinstance(fsdp, str) else []
    return next((_SHARDS[one] for one in words if isinstance(one, str) and one in _SHARDS), None)
