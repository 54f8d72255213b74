"""Trainer arguments of transformers, and a configuration of Accelerate.

Read in transformers 5.23 (`training_args.py`) and accelerate 1.15 (`commands/config/config_args.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ampdoctor.batching.reading.counts import count, half_of, table_in, word, yes
from ampdoctor.batching.reading.sharding import (
    REPLICATED,
    ULYSSES,
    Cut,
    fsdp_of_accelerate,
    fsdp_of_trainer,
    zero_stage,
)
from ampdoctor.batching.settings import BatchSettings, Precision
from ampdoctor.errors import UsageError
from ampdoctor.scaling.trace import Division

_DEFAULT_SIZE = 8
_TOKENS = (
    "Trainer divides by the step's tokens only if the model takes num_items_in_batch or compute_loss_func is given; "
    "elsewhere it takes the mean of each micro-batch."
)
_OWN_FILE = (
    "accelerator_config is a file of its own, which is not read: where it sets split_batches, "
    "per_device_train_batch_size is the batch of all ranks."
)


def trainer_arguments(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what `TrainingArguments` say; what they leave out has the library's default.

    Raises:
        UsageError: A number that is none, or words that Trainer does not know.
    """
    precision = half_of(name, fp16=_switch(table, "fp16", name), bf16=_switch(table, "bf16", name))
    deepspeed = table.get("deepspeed")
    cut = fsdp_of_trainer(table, name)
    notes = [_TOKENS, *cut.notes]
    if table.get("auto_find_batch_size"):
        notes.append("auto_find_batch_size: Trainer takes a smaller micro-batch where memory runs out, on its own.")
    if isinstance(deepspeed, Mapping):
        stage = zero_stage(table_in(deepspeed, "zero_optimization", name), "stage", name)
        notes.append("deepspeed: the sizes in its configuration have to be these, or auto.")
    else:
        stage = cut.stage
        if deepspeed:
            notes.append(
                "deepspeed: the sizes in its configuration have to be these, or auto; its ZeRO stage is not read from "
                "there, and --shard-stage says it."
            )
    size = count(table, "per_device_train_batch_size", name) or count(table, "per_gpu_train_batch_size", name)
    if size is None:
        size = _DEFAULT_SIZE
        notes.append(f"per_device_train_batch_size is not given: {size}, as Trainer takes it.")
    steps = count(table, "gradient_accumulation_steps", name) or 1
    shared = _split_batches(table, name)
    if shared is None:
        notes.append(_OWN_FILE)
    return BatchSettings(
        framework="transformers",
        global_batch=size * steps if shared else None,
        micro_batch=None if shared else size,
        accumulation=steps,
        shard_stage=stage,
        within_node=cut.within_node,
        precision=precision,
        reduction="tokens",
        division=_division(precision, sharded=cut.stage is not None, elsewhere=bool(deepspeed)),
        fixed_total=bool(shared),
        notes=tuple(notes),
    )


def _switch(table: Mapping[str, Any], key: str, name: str) -> bool | None:
    if isinstance(table.get(key), str):
        raise UsageError(f"{name}: {key} is true or false without quotes: Trainer takes every text for true")
    return yes(table, key, name)


def _split_batches(table: Mapping[str, Any], name: str) -> bool | None:
    """Whether the loader's batch is that of all ranks; None if another file says it."""
    config = table.get("accelerator_config")
    if isinstance(config, str):
        return None
    # until transformers 4.38 it was an argument of its own
    return yes(table_in(table, "accelerator_config", name), "split_batches", name) or yes(table, "split_batches", name)


def accelerate(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what `accelerate config` has written; the micro-batch is the data loader's, and stands elsewhere.

    Raises:
        UsageError: A number that is none, or a strategy that there is not.
    """
    deepspeed = table_in(table, "deepspeed_config", name)
    fsdp = table_in(table, "fsdp_config", name)
    megatron = table_in(table, "megatron_lm_config", name)
    parallel = table_in(table, "parallelism_config", name)
    mixed = word(table, "mixed_precision", "no")
    if mixed not in ("no", "fp16", "bf16", "fp8"):
        raise UsageError(f"{name}: mixed_precision is no, fp16, bf16 or fp8, not {mixed}")
    precision: Precision = {"fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}.get(mixed, "fp32")  # type: ignore[assignment]
    kind = word(table, "distributed_type", "no")
    sharded = bool(fsdp) or kind == "fsdp"
    cut = fsdp_of_accelerate(fsdp, name) if sharded else Cut(stage=_stage(deepspeed, megatron, name))
    notes = [
        "An Accelerate configuration says neither the data loader's batch nor its split_batches: --micro-batch does."
    ]
    if cut.stage is None and kind in ("deepspeed", "megatron_lm"):
        notes.append(f"How {kind} cuts the states stands elsewhere: they are taken as whole; --shard-stage says it.")
    if (count(parallel, "parallelism_config_dp_replicate_size", name) or 1) > 1:
        notes.append(REPLICATED)
    sequence, context = (count(parallel, f"parallelism_config_{of}_size", name) or 1 for of in ("sp", "cp"))
    if sequence > 1:
        notes.append(ULYSSES)
    devices, nodes = count(table, "num_processes", name), count(table, "num_machines", name)
    return BatchSettings(
        framework="accelerate",
        devices=devices,
        per_node=None if devices is None or nodes is None or devices % nodes else devices // nodes,
        accumulation=count(deepspeed, "gradient_accumulation_steps", name),
        tensor=count(megatron, "megatron_lm_tp_degree", name) or count(parallel, "parallelism_config_tp_size", name),
        pipeline=count(megatron, "megatron_lm_pp_degree", name),
        context=context * sequence,
        shard_stage=cut.stage,
        within_node=cut.within_node,
        precision=precision,
        division=_division(precision, sharded=sharded, elsewhere=bool(deepspeed or megatron)),
        notes=tuple(notes),
    )


def _stage(deepspeed: Mapping[str, Any], megatron: Mapping[str, Any], name: str) -> int | None:
    if yes(megatron, "megatron_lm_use_distributed_optimizer", name):
        return 1
    return zero_stage(deepspeed, "zero_stage", name)


def _division(precision: Precision | None, *, sharded: bool, elsewhere: bool) -> Division | Literal["none"] | None:
    """Under autocast DDP reduces the fp32 gradients of fp32 parameters; FSDP in its mixed precision's dtype."""
    if precision != "fp16":
        return "none"
    return None if elsewhere else "split" if sharded else "none"
