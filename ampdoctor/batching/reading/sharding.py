"""What of a model's states ZeRO and FSDP cut, in the words of those that configure them.

Read in accelerate 1.15 (`FullyShardedDataParallelPlugin`) and transformers 5.23 (`_process_fsdp_args`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampdoctor.batching.memory import STAGES
from ampdoctor.batching.reading.counts import count, shown, table_in
from ampdoctor.errors import UsageError

STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""FSDP's, in the order in which accelerate and torch count them from 1, and the stage of ZeRO that cuts as much."""
_RESHARDS = {"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}
"""FSDP2 has a switch in their place: whether what was gathered for the forward is given back before the backward."""
_BESIDE = ("offload", "auto_wrap")
"""What else may stand in Trainer's `fsdp`."""

REPLICATED = "Replicated shards: --shard-stage sizes states as if all ranks shared one copy."
"""Where a number of replicas is given, each of which is a copy; whether it is to stay, nobody says."""

ULYSSES = "Ulysses' sequence parallel ranks see the same samples: they are counted as context parallel (--cp)."
"""DeepSpeed's `sequence_parallel_size`, by which it divides the ranks, and which shares the states as they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How states are cut.

    Attributes:
        stage: As ZeRO counts; None if nothing is cut, or nobody knows.
        within_node: Only the devices of a node share a copy.
        notes: What is not known, a sentence each.
    """

    stage: int | None = None
    within_node: bool = False
    notes: tuple[str, ...] = ()


def zero_stage(table: Mapping[str, Any], key: str, name: str) -> int | None:
    """Returns a stage of ZeRO; None if nothing is said.

    Raises:
        UsageError: There is no such stage.
    """
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value) in map(str, STAGES):
        return int(value)
    raise UsageError(f"{name}: {key} is 0, 1, 2 or 3, not {shown(value)}")


def fsdp_of_accelerate(fsdp: Mapping[str, Any], name: str) -> Cut:
    """Returns what an `fsdp_config` of Accelerate cuts.

    Raises:
        UsageError: It has a strategy that there is not.
    """
    switch = count(fsdp, "fsdp_version", name) == 2
    key = "fsdp_reshard_after_forward" if switch else "fsdp_sharding_strategy"
    return _cut(fsdp.get(key), key, name)


def fsdp_of_trainer(table: Mapping[str, Any], name: str) -> Cut:
    """Returns what `fsdp` and `fsdp_config` of Trainer cut.

    Raises:
        UsageError: They have a word that Trainer does not know.
    """
    fsdp = table.get("fsdp")
    if not fsdp:
        return Cut()
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    if not isinstance(fsdp, str | list | bool):
        raise UsageError(f"{name}: fsdp is true, or words, not {shown(fsdp)}")
    strategy = next((word for word in words if word not in _BESIDE), None)
    if isinstance(table.get("fsdp_config"), str):
        kept = _cut(strategy, "fsdp", name)
        note = (
            f"fsdp_config is a file of its own, which is not read: states are taken to be cut as stage {kept.stage} "
            "cuts them; --shard-stage says otherwise."
        )
        return Cut(stage=kept.stage, within_node=kept.within_node, notes=(note,))
    more = {str(key).removeprefix("fsdp_"): value for key, value in table_in(table, "fsdp_config", name).items()}
    reshard = more.get("reshard_after_forward")
    return _cut(strategy, "fsdp", name) if reshard is None else _cut(reshard, "reshard_after_forward", name)


def _cut(strategy: Any, key: str, name: str) -> Cut:
    """What a strategy cuts: its name, its number or FSDP2's switch; everything if none is said."""
    text = "FULL_SHARD" if strategy is None else str(strategy) if isinstance(strategy, str | int) else ""
    known = _RESHARDS.get(text.lower(), text.upper())
    if known in map(str, range(1, len(STRATEGIES) + 1)):
        known = list(STRATEGIES)[int(known) - 1]
    if known not in STRATEGIES:
        raise UsageError(f"{name}: {key} is one of {', '.join(STRATEGIES)}, not {shown(strategy)}")
    return Cut(stage=STRATEGIES[known], within_node=known.startswith("HYBRID"))
