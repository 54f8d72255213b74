"""Which framework a configuration is of, by what stands in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ampdoctor.batching.reading.deepspeed import KEYS, deepspeed
from ampdoctor.batching.reading.flags import flags_in, flags_of
from ampdoctor.batching.reading.huggingface import accelerate, trainer_arguments
from ampdoctor.batching.reading.languages import read_json, table_of, yaml_table
from ampdoctor.batching.reading.megatron import megatron
from ampdoctor.batching.reading.torchtitan import torchtitan
from ampdoctor.batching.settings import BatchSettings
from ampdoctor.errors import UsageError

_KNOWN = (
    "a DeepSpeed JSON, Megatron-LM's arguments, Trainer arguments in JSON or YAML, "
    "an Accelerate YAML or a torchtitan TOML"
)


def read_settings(text: str, name: str) -> BatchSettings:
    """Returns what a configuration says of the batch in force.

    Args:
        text: Its text.
        name: Its file, whose ending says the language; without one of JSON, TOML or YAML it is a script with flags.

    Raises:
        UsageError: It cannot be read, is none of those that are known, or says something that makes no sense.
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
    """What a program's flags say: of all programs that have some, only these two are known by theirs."""
    if "per_device_train_batch_size" in flags:
        return trainer_arguments(flags, name)
    if "micro_batch_size" in flags:
        return megatron(flags, name)
    raise _nothing(name)


def _nothing(name: str) -> UsageError:
    return UsageError(f"{name} says nothing of a batch: it is none of {_KNOWN}")


def _listed(text: str) -> Mapping[str, Any]:
    """The arguments, where what has another file's ending is a JSON list of them all the same."""
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
