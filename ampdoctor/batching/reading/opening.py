"""Which framework a configuration is of, by what stands in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ampdoctor.batching.reading.deepspeed import KEYS, deepspeed
from ampdoctor.batching.reading.huggingface import accelerate, trainer_arguments
from ampdoctor.batching.reading.megatron import flags_in, flags_of, megatron
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
        if "training" in table:
            return torchtitan(table, name)
    elif ending in (".yaml", ".yml"):
        table = _yaml(text, name)
    elif ending == ".json" or text.lstrip()[:1] == "{":
        table = _json(text, name)
    else:
        table = _listed(text) or flags_in(text, name)
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
    raise UsageError(f"{name} says nothing of a batch: it is none of {_KNOWN}")


def _json(text: str, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{name} is not JSON") from None
    return _flags(value) or _table(value, name, "JSON")


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


def _yaml(text: str, name: str) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"{name} is YAML, and PyYAML, which reads it, is not installed: pip install 'ampdoctor[yaml]'"
        ) from None
    try:
        return _table(yaml.safe_load(text), name, "YAML")
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{name} is not YAML") from None


def _table(value: Any, name: str, language: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} is {language}, and no table of settings")
    return value
