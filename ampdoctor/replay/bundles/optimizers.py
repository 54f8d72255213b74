"""An optimizer's class, groups and state in a manifest, and an optimizer made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.json_values import NotInertError, UnreadableTreeError, class_name, read, written
from ampdoctor.replay.bundles.tensors import Entry

_ON_A_GPU = ("capturable",)
"""Settings that torch refuses where parameters are not on a GPU; they change no number."""


def optimizer_out(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    tensor: Callable[[str, torch.Tensor], Entry | None],
    settings: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns an optimizer for a manifest.

    Args:
        optimizer: The optimizer.
        names: The parameters' names by id.
        tensor: Takes a state tensor's name and the tensor; gives its entry, None where it is left out.
        settings: Of its groups; none: those that it has now.
    """
    lost: list[str] = []
    groups = [
        {"params": [names.get(id(p)) for p in group["params"]], "settings": _settings(kept, lost)}
        for group, kept in zip(optimizer.param_groups, settings or optimizer.param_groups, strict=True)
    ]
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            continue
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                entry = tensor(f"optimizer/{name}/{key}", value)
                if entry is not None:
                    kept[str(key)] = {"tensor": entry}
            else:
                try:
                    kept[str(key)] = {"value": written(value)}
                except NotInertError:
                    lost.append(str(key))
        states[name] = kept
    return {"class": class_name(type(optimizer)), "groups": groups, "state": states, "lost": sorted(set(lost))}


def settings_out(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings of an optimizer's groups for a manifest, those that have a plain value."""
    return [_settings(group, []) for group in groups]


def settings_in(said: Any, find: Callable[[str, str], Any]) -> tuple[dict[str, Any], ...]:
    """Returns the settings of a manifest.

    Raises:
        TypeError, AttributeError: It is no list of tables.
        UnreadableTreeError: One of them is no plain value.
    """
    if not isinstance(said, list):
        raise TypeError("settings")
    return tuple({key: read(one, find) for key, one in group.items() if key != "params"} for group in said)


def _settings(group: Mapping[str, Any], lost: list[str]) -> dict[str, Any]:
    settings = {}
    for key, value in group.items():
        if key != "params":
            try:
                settings[key] = written(value.item() if _is_number(value) else value)
            except NotInertError:
                lost.append(str(key))
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def optimizer_in(
    said: Mapping[str, Any],
    parameters: Mapping[str, torch.Tensor],
    tensor: Callable[[Entry], torch.Tensor],
    find: Callable[[str, str], Any],
    say: Callable[[str], None],
) -> torch.optim.Optimizer | None:
    """Returns the optimizer over a model's parameters.

    One whose class is not here becomes SGD at learning rate 0: gradients are unscaled and looked at as before.

    Args:
        said: What the manifest says; nothing in it is trusted.
        parameters: By name.
        tensor: Makes the tensor of an entry.
        find: Returns the user's class by module and qualified name; None for one that is not to be used.
        say: Told what is another than it was, in sentences.

    Raises:
        CheckpointError: It is malformed, or names parameters that the model lacks.
    """
    try:
        module, _, name = said["class"].partition(":")
        groups = [
            (
                [parameters[one] for one in group["params"] if one is not None],
                {key: read(one, find) for key, one in group["settings"].items()},
            )
            for group in said["groups"]
        ]
        cls = _class(module, name, find)
        if cls is None:
            say(f"the optimizer {name} of {module} is not here: the update is not replayed (gradients are)")
            return torch.optim.SGD([{"params": held} for held, _ in groups if held], lr=0.0)
        optimizer = _made(cls, groups)
        for key, state in said["state"].items():
            parameter = parameters[key]
            kept = optimizer.state[parameter]
            for part, value in state.items():
                kept[part] = tensor(value["tensor"]) if "tensor" in value else read(value["value"], find)
    except (KeyError, TypeError, ValueError, AttributeError, UnreadableTreeError, AssertionError) as error:
        raise CheckpointError(f"the bundle's optimizer cannot be made ({type(error).__name__}: {error}).") from None
    return optimizer


def _class(module: str, name: str, find: Callable[[str, str], Any]) -> type[torch.optim.Optimizer] | None:
    own = module.startswith("torch.optim.") and name.isidentifier()
    found = getattr(torch.optim, name, None) if own else find(module, name)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def _made(
    cls: type[torch.optim.Optimizer], groups: list[tuple[list[torch.Tensor], dict[str, Any]]]
) -> torch.optim.Optimizer:
    known = inspect.signature(cls).parameters
    first = groups[0][1] if groups else {}
    arguments = {key: value for key, value in first.items() if key in known and key != "params"}
    arguments.update(dict.fromkeys((key for key in _ON_A_GPU if key in arguments), False))
    optimizer = cls([{"params": held} for held, _ in groups], **arguments)
    for group, (_, settings) in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in settings.items() if key not in (*_ON_A_GPU, "params")})
    return optimizer
