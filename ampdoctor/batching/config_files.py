"""Reads the batch from a framework's configuration; the keys decide which framework it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from ampdoctor.batching.config_fields import (
    REPLICATED,
    ULYSSES,
    Cut,
    count,
    flags_in,
    flags_of,
    fsdp_of_accelerate,
    fsdp_of_trainer,
    half_of,
    read_json,
    table_in,
    table_of,
    word,
    yaml_table,
    yes,
    zero_stage,
)
from ampdoctor.batching.plans import BatchSettings, Precision
from ampdoctor.errors import UsageError
from ampdoctor.scaling.trace import GradReduceScaling

# -- Trainer arguments of transformers, and Accelerate's configuration --
#
# Sources: transformers 5.23 (`training_args.py`) and accelerate 1.15 (`commands/config/config_args.py`).


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
    """Reads `TrainingArguments`, with the library's defaults; raises UsageError for invalid values."""
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
        division=_trainer_division(precision, sharded=cut.stage is not None, elsewhere=bool(deepspeed)),
        fixed_total=bool(shared),
        notes=tuple(notes),
    )


def _switch(table: Mapping[str, Any], key: str, name: str) -> bool | None:
    if isinstance(table.get(key), str):
        raise UsageError(f"{name}: {key} is true or false without quotes: Trainer takes every text for true")
    return yes(table, key, name)


def _split_batches(table: Mapping[str, Any], name: str) -> bool | None:
    """Returns whether the loader's batch is that of all ranks; None if another file decides it."""
    config = table.get("accelerator_config")
    if isinstance(config, str):
        return None
    # until transformers 4.38 it was an argument of its own
    return yes(table_in(table, "accelerator_config", name), "split_batches", name) or yes(table, "split_batches", name)


def accelerate(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Reads the output of `accelerate config`; raises UsageError for invalid values.

    The micro-batch is not in it: it is the data loader's.
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
    cut = fsdp_of_accelerate(fsdp, name) if sharded else Cut(stage=_trainer_stage(deepspeed, megatron, name))
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
        division=_trainer_division(precision, sharded=sharded, elsewhere=bool(deepspeed or megatron)),
        notes=tuple(notes),
    )


def _trainer_stage(deepspeed: Mapping[str, Any], megatron: Mapping[str, Any], name: str) -> int | None:
    if yes(megatron, "megatron_lm_use_distributed_optimizer", name):
        return 1
    return zero_stage(deepspeed, "zero_stage", name)


def _trainer_division(
    precision: Precision | None, *, sharded: bool, elsewhere: bool
) -> GradReduceScaling | Literal["none"] | None:
    """Under autocast DDP reduces the fp32 gradients of fp32 parameters; FSDP in its mixed precision's dtype."""
    if precision != "fp16":
        return "none"
    return None if elsewhere else "split" if sharded else "none"


# -- DeepSpeed's configuration; source: deepspeed 0.19.8 (`runtime/config.py`, `runtime/engine.py`) --


KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")
"""Every DeepSpeed configuration has one of these keys, and no other framework's has."""
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def deepspeed(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Reads the configuration; two of the three sizes determine the third, as in DeepSpeed.

    Raises UsageError for an invalid number, an unknown ZeRO stage, or a batch that DeepSpeed chooses.
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
        steps = 1  # DeepSpeed's default where only one size is given
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
        division="none" if fp16 is False else _deepspeed_division(table, stage, name),
        filled=bool(filled),
        notes=tuple(notes),
    )


def _deepspeed_division(table: Mapping[str, Any], stage: int, name: str) -> GradReduceScaling | Literal["none"]:
    if word(table, "communication_data_type", "fp16") != "fp16":
        return "none"
    scattered = table_in(table, "zero_optimization", name).get("reduce_scatter", True)
    if stage == 3 or (stage and scattered) or table.get("prescale_gradients"):
        return "before"
    return "after"


# -- Megatron-LM's arguments, from a script's flags or its YAML; source: its `training/arguments.py` --


_FSDP = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""Megatron-FSDP's strategies, and the ZeRO stage that shards as much."""


def megatron(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Reads flags, or the keys of a YAML, with underscores; raises UsageError for a number that is none.

    A shell's variable is no number either.
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
        shard_stage=_megatron_stage(table, name),
        precision=precision,
        reduction="sum" if _on(table, "calculate_per_token_loss") else "mean",
        division="before" if half and not fp32_reduce else "none",
        rounds_down=_on(table, "decrease_batch_size_if_needed"),
        notes=tuple(notes),
    )


def _megatron_stage(table: Mapping[str, Any], name: str) -> int:
    if _on(table, "use_torch_fsdp2"):
        return 2 if _on(table, "torch_fsdp2_no_reshard_after_forward") else 3
    if _on(table, "use_megatron_fsdp") or _on(table, "use_custom_fsdp"):
        strategy = word(table, "data_parallel_sharding_strategy", "no_shard")
        if strategy not in _FSDP:
            raise UsageError(f"{name}: data_parallel_sharding_strategy is one of {', '.join(_FSDP)}, not {strategy}")
        return _FSDP[strategy]
    return 1 if _on(table, "use_distributed_optimizer") else 0


def _on(table: Mapping[str, Any], key: str) -> bool:
    """Whether a switch is there; the word after it is not its value, but the script's next word."""
    return str(table.get(key)).lower() not in ("none", "false")


# -- torchtitan's TOML: up to release 0.2.2 (`config/job_config.py`); 0.3 is configured in Python --
#
# `batch_size` is `local_batch_size` since mid 2025, and degrees were in `training` and `experimental` before
# `parallelism` had them. The accumulation is derived; a fork (flame) has a key for it. Since 0.2.2 the loss of a
# micro-batch is its sum over the step's tokens (`forward_backward_step`), and FSDP no longer divides
# (`disable_fsdp_gradient_division`).


_STEP = (
    "The loss is a sum that the step's tokens divide, and no reduce divides again: torchtitan since 0.2.2. Releases "
    "before take the mean of each micro-batch, which --reduction mean says."
)


def torchtitan(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Reads the file, with torchtitan's defaults; raises UsageError for an invalid number, or a batch in tokens."""
    training = table_in(table, "training", name)
    if any(key.startswith("num_tokens") for key in training):
        raise UsageError(
            f"{name}: its batch counts tokens, and a plan counts samples: give --global-batch and the rest"
        )
    parallelism = _parallelism(table, name)
    batch = count(training, "global_batch_size", name)
    size = count(training, "local_batch_size", name) or count(training, "batch_size", name)
    steps = count(training, "gradient_accumulation_steps", name)
    half = training.get("mixed_precision_param", "bfloat16")
    precision: Precision = "fp16" if half == "float16" else "bf16" if half == "bfloat16" else "fp32"
    replicas = count(parallelism, "data_parallel_replicate_degree", name) or 1
    notes = [REPLICATED] if replicas > 1 else []
    if size is None:
        size = _DEFAULT_SIZE
        notes.append(f"local_batch_size is not given: {size}, as torchtitan takes it.")
    old = "batch_size" in training
    if not old:
        notes.append(_STEP)
    return BatchSettings(
        framework="torchtitan",
        global_batch=batch,
        micro_batch=size,
        accumulation=steps or (1 if batch is None else None),
        tensor=count(parallelism, "tensor_parallel_degree", name),
        pipeline=count(parallelism, "pipeline_parallel_degree", name),
        context=count(parallelism, "context_parallel_degree", name),
        shard_stage=_stage(training, parallelism, name),
        precision=precision,
        reduction="mean" if old else "step",
        division="split" if precision == "fp16" and training.get("mixed_precision_reduce") == "float16" else "none",
        notes=tuple(notes),
    )


def _parallelism(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the degrees, which were in two other tables until the end of 2024."""
    return {
        **table_in(table, "experimental", name),
        **table_in(table, "training", name),
        **table_in(table, "parallelism", name),
    }


def _stage(training: Mapping[str, Any], parallelism: Mapping[str, Any], name: str) -> int:
    if word(training, "data_parallel_type", "fsdp") == "ddp":  # of mid 2024, beside one data_parallel_degree
        return 0
    degrees = (count(parallelism, key, name) for key in ("data_parallel_shard_degree", "data_parallel_degree"))
    return 0 if 1 in degrees else 3


_KNOWN = (
    "a DeepSpeed JSON, Megatron-LM's arguments, Trainer arguments in JSON or YAML, "
    "an Accelerate YAML or a torchtitan TOML"
)


def read_settings(text: str, name: str) -> BatchSettings:
    """Reads the batch in force from a configuration's text.

    The ending of `name` decides the language; without one of JSON, TOML or YAML it is a script with flags. Raises
    UsageError where it cannot be read, is of no known kind, or makes no sense.
    """
    ending = PurePath(name).suffix.lower()
    if ending == ".toml":
        table = _toml(text, name)
        return torchtitan(table, name) if "training" in table else _of_table(table, name)
    if ending in (".yaml", ".yml"):
        return _of_table(yaml_table(text, name), name)
    if ending != ".json" and text.lstrip()[:1] != "{":
        return _of_flags(_listed(text) or flags_in(text, name), name)
    value = read_json(text, name)
    flags = _flags(value)
    return _of_flags(flags, name) if flags else _of_table(table_of(value, name, "JSON"), name)


def _of_table(table: Mapping[str, Any], name: str) -> BatchSettings:
    if any(key in table for key in KEYS):
        return deepspeed(table, name)
    if "per_device_train_batch_size" in table:
        return trainer_arguments(table, name)
    if "distributed_type" in table:
        return accelerate(table, name)
    if "micro_batch_size" in table:
        return megatron(table, name)
    if "gradient_accumulation_steps" in table or "output_dir" in table:
        return trainer_arguments(table, name)
    raise _nothing(name)


def _of_flags(flags: Mapping[str, Any], name: str) -> BatchSettings:
    """Reads a program's flags; only two programs can be recognised by theirs."""
    if "per_device_train_batch_size" in flags:
        return trainer_arguments(flags, name)
    if "micro_batch_size" in flags:
        return megatron(flags, name)
    raise _nothing(name)


def _nothing(name: str) -> UsageError:
    return UsageError(f"{name} says nothing of a batch: it is none of {_KNOWN}")


def _listed(text: str) -> Mapping[str, Any]:
    """Returns the arguments, where a file with another ending is a JSON list of them."""
    try:
        return _flags(json.loads(text)) if text.lstrip()[:1] == "[" else {}
    except (ValueError, RecursionError):
        return {}


def _flags(value: Any) -> Mapping[str, Any]:
    return (
        flags_of(value) if isinstance(value, list) and all(isinstance(one, str | int | float) for one in value) else {}
    )


def _toml(text: str, name: str) -> Mapping[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {error}") from None
