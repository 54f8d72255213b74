"""Megatron-LM's arguments, from the flags of a script or its YAML; as read in its `training/arguments.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.batching.reading.counts import count, half_of, table_in, word
from ampdoctor.batching.reading.sharding import REPLICATED
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.errors import UsageError

_FSDP = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Megatron-FSDP's strategies, and the stage of ZeRO that cuts as much."""


def megatron(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what the arguments say.

    Args:
        table: Flags, or the keys of a YAML; with underscores.
        name: Of the file.

    Raises:
        UsageError: A number that is none; a shell's variable is none either.
    """
    parallel = {**table_in(table, "model_parallel", name), **table}
    for key, value in parallel.items():
        if isinstance(value, str) and "$" in value and key.endswith(("batch_size", "parallel_size")):
            raise UsageError(f"{name}: {key} is the shell's {value}, whose value is not known here")
    micro = count(table, "micro_batch_size", name)
    if micro is None:
        raise UsageError(f"{name}: Megatron-LM does not start without a micro-batch-size")
    if "gradient_accumulation_steps" in table and "global_batch_size" not in table:
        raise UsageError(
            f"{name}: micro_batch_size beside gradient_accumulation_steps is neither Megatron-LM's nor Trainer's: say "
            "them by --micro-batch and --accumulation"
        )
    notes = []
    if table.get("rampup_batch_size"):
        notes.append("rampup-batch-size: the plan is for the batch at its end; each one on the way has to divide too.")
    fp32_reduce = _on(table, "accumulate_allreduce_grads_in_fp32")
    precision = half_of(name, fp16=_on(parallel, "fp16"), bf16=_on(parallel, "bf16"))
    half = precision == "fp16"
    if (count(table, "num_distributed_optimizer_instances", name) or 1) > 1:
        notes.append(REPLICATED)
    return BatchSettings(
        framework="megatron",
        global_batch=count(table, "global_batch_size", name),
        micro_batch=micro,
        accumulation=None if table.get("global_batch_size") else 1,
        tensor=count(parallel, "tensor_model_parallel_size", name),
        pipeline=count(parallel, "pipeline_model_parallel_size", name),
        context=count(parallel, "context_parallel_size", name),
        shard_stage=_stage(table, name),
        precision=precision,
        reduction="sum" if _on(table, "calculate_per_token_loss") else "mean",
        division="before" if half and not fp32_reduce else "none",
        rounds_down=_on(table, "decrease_batch_size_if_needed"),
        notes=tuple(notes),
    )


def _stage(table: Mapping[str, Any], name: str) -> int:
    if _on(table, "use_torch_fsdp2"):
        return 2 if _on(table, "torch_fsdp2_no_reshard_after_forward") else 3
    if _on(table, "use_megatron_fsdp") or _on(table, "use_custom_fsdp"):
        strategy = word(table, "data_parallel_sharding_strategy", "no_shard")
        if strategy not in _FSDP:
            raise UsageError(f"{name}: data_parallel_sharding_strategy is one of {', '.join(_FSDP)}, not {strategy}")
        return _FSDP[strategy]
    return 1 if _on(table, "use_distributed_optimizer") else 0


def _on(table: Mapping[str, Any], key: str) -> bool:
    """Whether a switch is there; the word behind it is no value of its, but whatever the script goes on with."""
    return str(table.get(key)).lower() not in ("none", "false")
