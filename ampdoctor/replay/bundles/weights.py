"""Puts what a bundle holds of a model's tensors into a model that was made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ampdoctor.errors import CheckpointError, FactoryError

_NAMED = 3


def put_weights(
    model: nn.Module,
    manifest: Mapping[str, Any],
    stored: Callable[[Mapping[str, Any]], torch.Tensor | None],
    whose: str,
) -> None:
    """Give a model the bundle's parameters and buffers, their dtypes, what is tied and what is frozen, and its mode.

    Args:
        model: The model; changed in place.
        manifest: The bundle's; nothing in it is trusted.
        stored: Makes the tensor of an entry; None for one that was left out.
        whose: Who has made the model, as the subject of an error's sentence.

    Raises:
        FactoryError: The model has other parameters, or of other shapes.
        CheckpointError: The manifest is malformed.
    """
    try:
        _put_parameters(model, manifest["parameters"], stored, whose)
        _put_buffers(model, manifest["buffers"], stored)
        model.train()
        modules = dict(model.named_modules())
        for name in manifest["evaluating"]:
            if name in modules:
                modules[name].training = False
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the bundle's entries of the model are malformed ({type(error).__name__}).") from None


def _put_parameters(
    model: nn.Module, entries: Mapping[str, Any], stored: Callable[[Mapping[str, Any]], torch.Tensor | None], whose: str
) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    _check_names(own.keys(), entries.keys(), whose)
    tied = {name: entry["same_as"] for name, entry in entries.items() if "same_as" in entry}
    for name, entry in entries.items():
        if name in tied:
            continue
        parameter, tensor = own[name], stored(entry)
        if list(parameter.shape) != entry["shape"]:
            shape = "x".join(map(str, entry["shape"])) or "a number"
            here = "x".join(map(str, parameter.shape)) or "a number"
            raise FactoryError(f"{whose} makes a model whose {name} is {here}, and the bundle's is {shape}")
        if tensor is None:
            parameter.data = parameter.data.to(getattr(torch, entry["dtype"].removeprefix("torch.")))
        else:
            parameter.data = tensor.detach()
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(entry["requires_grad"] is True)
    for name, first in tied.items():
        if own[name] is not own[first]:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, own[first])
    _untie(model, entries, stored, tied)


def _untie(
    model: nn.Module,
    entries: Mapping[str, Any],
    stored: Callable[[Mapping[str, Any]], torch.Tensor | None],
    tied: Mapping[str, str],
) -> None:
    """Two names that are one parameter in the fresh model alone get one each."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known == name or tied.get(name, name) == tied.get(known, known):
            continue
        tensor = stored(entries[name])
        parent, _, last = name.rpartition(".")
        value = parameter.detach().clone() if tensor is None else tensor.detach()
        setattr(model.get_submodule(parent), last, nn.Parameter(value, requires_grad=entries[name]["requires_grad"]))
        before = stored(entries[known])  # the second of the two was put into it last
        if before is not None:
            parameter.data = before.detach()


def _put_buffers(
    model: nn.Module, entries: Mapping[str, Any], stored: Callable[[Mapping[str, Any]], torch.Tensor | None]
) -> None:
    modules = dict(model.named_modules())
    made: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        parent, _, last = name.rpartition(".")
        holder = modules.get(parent)
        tensor = made.get(entry["same_as"]) if "same_as" in entry else stored(entry)
        if holder is None or tensor is None:
            continue
        made[name] = tensor
        if last in holder._buffers:  # noqa: SLF001 - which tensor a module has registered
            holder._buffers[last] = tensor  # noqa: SLF001 - the same
        elif last.isidentifier() and not hasattr(holder, last):  # made by a forward
            holder.register_buffer(last, tensor, persistent=False)


def _check_names(own: Any, said: Any, whose: str) -> None:
    lacks, more = [name for name in said if name not in own], [name for name in own if name not in said]
    if lacks or more:
        parts = [
            f"{what} {', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
            for what, names in (("lacks", lacks), ("has besides", more))
            if names
        ]
        raise FactoryError(f"{whose} makes another model than the bundle's: it {' and '.join(parts)}")
