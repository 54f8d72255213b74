"""A torchtitan TOML: releases up to 0.2.2 read one (`config/job_config.py`), 0.3 is configured in Python.

`batch_size` is `local_batch_size` since mid 2025, and degrees stood in `training` and `experimental` before
`parallelism` had them. The accumulation is derived; a fork (flame) is told it. Since 0.2.2 the loss of a micro-batch is
its sum over the step's tokens (`forward_backward_step`), and FSDP divides no more (`disable_fsdp_gradient_division`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.batching.reading.counts import count, table_in, word
from ampdoctor.batching.reading.sharding import REPLICATED
from ampdoctor.batching.settings import BatchSettings, Precision
from ampdoctor.errors import UsageError

_DEFAULT_SIZE = 8
_STEP = (
    "The loss is a sum that the step's tokens divide, and no reduce divides again: torchtitan since 0.2.2. Releases "
    "before take the mean of each micro-batch, which --reduction mean says."
)


def torchtitan(table: Mapping[str, Any], name: str) -> BatchSettings:
    """Returns what the file says; what it leaves out has torchtitan's default.

    Raises:
        UsageError: A number that is none, or a batch in tokens.
    """
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
    """The degrees, which stood in two other tables until the end of 2024."""
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
