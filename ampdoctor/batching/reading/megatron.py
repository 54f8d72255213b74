"""Megatron-LM's arguments, from a script that sets them or its YAML; as read in its `training/arguments.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ampdoctor.batching.reading.counts import count, table_in
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.errors import UsageError

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--(?P<name>[a-z0-9-]+)(?:=|[ \t]+(?:\\\n\s*)?)?(?P<value>[^\s\\()=-][^\s\\()]*)?")


def flags_in(text: str) -> dict[str, str | bool]:
    """Returns the flags of a shell script, or of a list of arguments; the last of several of one name."""
    found = _FLAG.finditer(_COMMENT.sub("", text))
    return {one["name"].replace("-", "_"): (one["value"] or "").strip("\"'") or True for one in found}


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
    notes = []
    if table.get("rampup_batch_size"):
        notes.append("rampup-batch-size: the plan is for the batch at its end; each one on the way has to divide too.")
    fp32_reduce = bool(table.get("accumulate_allreduce_grads_in_fp32"))
    half = bool(parallel.get("fp16"))
    return BatchSettings(
        framework="megatron",
        global_batch=count(table, "global_batch_size", name),
        micro_batch=micro,
        accumulation=None if table.get("global_batch_size") else 1,
        tensor=count(parallel, "tensor_model_parallel_size", name),
        pipeline=count(parallel, "pipeline_model_parallel_size", name),
        context=count(parallel, "context_parallel_size", name),
        shard_stage=1 if table.get("use_distributed_optimizer") else 0,
        precision="fp16" if half else "bf16" if parallel.get("bf16") else "fp32",
        reduction="sum" if table.get("calculate_per_token_loss") else "mean",
        division="before" if half and not fp32_reduce else "none",
        rounds_down=bool(table.get("decrease_batch_size_if_needed")),
        notes=tuple(notes),
    )
