"""Which classes a bundle may name: torch's modules, plain data of transformers', and the user's own by `--model`."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ampdoctor.replay.bundles.named_code import NamedCode

_OF_TRANSFORMERS = ("transformers.modeling_outputs", "transformers.tokenization_utils_base")
"""Modules of plain data that the library does not offer at its top."""


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
