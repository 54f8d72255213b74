"""A torchtitan TOML: releases up to 0.2.2 read one (`config/job_config.py`), 0.3 is configured in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.batching.reading.counts import count, table_in
from ampdoctor.batching.settings import BatchSettings, Precision
from ampdoctor.errors import UsageError


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
    parallelism = table_in(table, "parallelism", name)
    batch = count(training, "global_batch_size", name)
    half = training.get("mixed_precision_param", "bfloat16")
    precision: Precision = "fp16" if half == "float16" else "bf16" if half == "bfloat16" else "fp32"
    replicas = count(parallelism, "data_parallel_replicate_degree", name) or 1
    return BatchSettings(
        framework="torchtitan",
        global_batch=batch,
        micro_batch=count(training, "local_batch_size", name) or 8,
        accumulation=1 if batch is None else None,
        tensor=count(parallelism, "tensor_parallel_degree", name),
        pipeline=count(parallelism, "pipeline_parallel_degree", name),
        context=count(parallelism, "context_parallel_degree", name),
        shard_stage=3 if parallelism.get("data_parallel_shard_degree", -1) != 1 else 0,
        precision=precision,
        reduction="mean",
        division="split" if precision == "fp16" and training.get("mixed_precision_reduce") == "float16" else "none",
        notes=("Replicated shards: --shard-stage sizes states as if all ranks shared one copy.",)
        if replicas > 1
        else (),
    )
