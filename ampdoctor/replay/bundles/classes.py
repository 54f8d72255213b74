"""Which classes a bundle may name: torch's layers, plain data of transformers', and the user's own by `--model`.

And what its configurations may say: numbers and words of an architecture, nothing that makes a library fetch or run.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ampdoctor.replay.bundles.named_code import NamedCode

_OF_TRANSFORMERS = ("transformers.modeling_outputs", "transformers.tokenization_utils_base")
"""Modules of plain data that the library does not offer at its top."""

_ACTS = re.compile(
    r"\w*_implementation(_internal)?|(use|allow_all)_kernels?|kernels?_config|auto_map|custom_pipelines?|\w*remote_code"
    r"|\w*quantization_config|(use_)?pretrained(_\w+)?|hub_\w+|hf_\w+|(code_)?revision|_?commit_hash|token"
    r"|use_auth_token"
)
"""Keys of a configuration, at any depth, that make a library load or fetch code and weights."""
_NAMES = re.compile(r"\w*(name_or_path|path|_file|_dir|_url|_uri|_repo|_repo_id|kernels?|kernel_mapping)")
"""Keys that do so where they hold a name, and are an architecture's where they hold a number or a switch."""
_ADDRESS = re.compile(r"(hf[-_]hub|local[-_]dir):|[a-z0-9+.-]+://", re.IGNORECASE)
"""How a value begins that names a place on the hub, on the network or on the disk: timm's spellings, and URLs."""
_OF_LORA = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layer_replication",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "modules_to_save",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_qalora",
        "use_rslora",
    }
)
"""Settings of LoRA that say which layers it has and how they compute. Of the others one imports a module by its name
(`megatron_core`), some read files, and some compute first values, which the bundle's weights replace."""
_DEEPEST = 20


def finding(code: NamedCode | None) -> Callable[[str, str], Any]:
    """Returns what finds a class by its module and qualified name; it gives None for one that is not to be used."""

    def find(module: str, qualname: str) -> Any:
        top = module.partition(".")[0]
        if top == "torch":
            return _of_torch(module, qualname)
        if top == "transformers":
            return _of_transformers(module, qualname)
        return None if code is None else code.find(module, qualname)

    return find


def _of_torch(module: str, qualname: str) -> Any:
    found = vars(sys.modules.get(module, torch)).get(qualname)
    if not isinstance(found, type) or found.__module__ != module:
        return None
    if not module.startswith(("torch.nn.", "torch.ao.nn.")):  # others compile, or call other processes
        return None
    return found if issubclass(found, nn.Module | nn.utils.rnn.PackedSequence) else None


def _of_transformers(module: str, qualname: str) -> Any:
    library = library_of("transformers")
    if library is None or not qualname.isidentifier():
        return None
    places = [library, *(importlib.import_module(module) for one in _OF_TRANSFORMERS if one == module)]
    for place in places:
        found = getattr(place, qualname, None)
        if isinstance(found, type) and found.__module__ == module and _is_data(found, library):
            return found
    return None


def _is_data(cls: type, library: Any) -> bool:
    configuration = library.PreTrainedConfig if hasattr(library, "PreTrainedConfig") else library.PretrainedConfig
    return dataclasses.is_dataclass(cls) or issubclass(cls, Mapping | enum.Enum | nn.Module | configuration)


def library_of(name: str) -> Any:
    """Returns an installed library; None where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def inert_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration of transformers' without those that make the library load or fetch.

    Args:
        fields: As a bundle has them, of whatever depth; nothing in them is trusted.
    """
    kept: dict[str, Any] = _inert(fields, 0)
    return kept


def _inert(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        return None
    if isinstance(value, Mapping):
        return {key: _inert(one, depth + 1) for key, one in value.items() if not _acts(key, one, value)}
    if isinstance(value, list | tuple):
        return type(value)(_inert(one, depth + 1) for one in value) if type(value) in (list, tuple) else None
    return value


def _acts(key: Any, value: Any, beside: Mapping[Any, Any]) -> bool:
    """Does a key with this value make a library load or fetch? A number only shapes layers."""
    if isinstance(value, str) and _ADDRESS.match(value):
        return True
    if not isinstance(key, str) or value is None:
        return False
    if key == "backbone":  # the name of a model: timm's are made here, those of the hub are fetched
        return not (isinstance(value, str) and "/" not in value and beside.get("use_timm_backbone") is True)
    return bool(_ACTS.fullmatch(key) or (isinstance(value, str | Mapping) and _NAMES.fullmatch(key)))


def configuration(cls: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a configuration of transformers' that names nothing which the library would load or fetch.

    Args:
        cls: Its class.
        fields: As in `inert_fields`.
    """
    config = cls.from_dict(inert_fields(fields))
    for part in _configurations(config, 0):
        if getattr(part, "use_pretrained_backbone", False):  # the default of some: transformers before 5
            part.use_pretrained_backbone = False
    return config


def _configurations(config: Any, depth: int) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(type(value), "model_type") and depth < _DEEPEST:
            yield from _configurations(value, depth + 1)


def lora_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a LoRA configuration that a bundle may decide."""
    return {key: value for key, value in fields.items() if key in _OF_LORA}
