"""Names of modules and tensors as the user wrote them, without the parts that DataParallel, DDP, compile etc. add."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import torch
    from torch import nn

_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""torch's wrapper classes, with the attribute that holds the user's module."""

UNMISTAKABLE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of a name that only wrappers write, unlike `module`."""


def clean_name(name: str) -> str:
    """Returns the name without the parts that only a wrapper can have added; `module` may be the user's, and stays."""
    return ".".join(part for part in name.split(".") if part not in UNMISTAKABLE)


def wrapped_as(module: nn.Module) -> str | None:
    """Returns the attribute that holds the wrapped module if `module` is one of torch's wrappers, else None."""
    # by name over the MRO: the wrappers' own modules (dynamo, distributed) are slow to import and may be unavailable
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.") and cls.__name__ in _WRAPPERS:
            return _WRAPPERS[cls.__name__]
    return None


def clean_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of `model.named_modules(remove_duplicate=False)` to the name as the user wrote it."""
    names: dict[str, str] = {}
    skipped: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        clean_parent = names.get(parent, "")
        names[name] = clean_parent if name in skipped else ".".join(part for part in (clean_parent, last) if part)
        if (held := wrapped_as(module)) is not None:
            skipped.add(f"{name}.{held}" if name else held)
    return names


def clean_tensor_names(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Maps `keys` (of parameters, buffers or a `state_dict()` of `model`) to the names as the user wrote them."""
    modules = clean_names(model)
    return {key: clean_tensor_name(key, modules) for key in keys}


def clean_tensor_name(key: str, modules: Mapping[str, str]) -> str:
    """Returns a parameter's or buffer's name as the user wrote it; `modules` maps module names to clean ones."""
    # some wrappers are not part of state_dict() names, so the longest prefix that names a module is cleaned
    parts = key.split(".")
    for cut in range(len(parts) - 1, -1, -1):
        prefix = ".".join(parts[:cut])
        if prefix in modules:
            return ".".join(part for part in (modules[prefix], *parts[cut:]) if part)
    return key


def names_of_parameters(
    model: nn.Module, modules: Mapping[str, str], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[int, str]:
    """Returns names by `id(parameter)`: the model's, else "NAME.group0.param0"; `modules` maps to names to show."""
    names = {id(p): clean_tensor_name(name, modules) for name, p in model.named_parameters()}
    for key, optimizer in optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"{key}.group{g}.param{i}")
    return names


def other_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Maps each name of a tied weight or shared module to the others; `named_parameters()` yields only the first."""
    modules = clean_names(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    cleaned = clean_tensor_names(model, [name for name, _ in tensors])
    known: dict[int, dict[str, None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known.setdefault(id(module), {})[modules[name]] = None
    for name, tensor in tensors:
        known.setdefault(id(tensor), {})[cleaned[name]] = None
    several = [list(names) for names in known.values() if len(names) > 1]
    return {name: tuple(other for other in names if other != name) for names in several for name in names}


def scripted_modules(model: nn.Module) -> tuple[str, ...]:
    """Returns the outermost TorchScript modules, inside which hooks and lines of code are not available."""
    import torch

    names = clean_names(model)
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(module, torch.jit.ScriptModule) and not inside:
            found.append(name)
    return tuple(names[name] for name in found)


def match_keys(keys: Collection[str], expected: Collection[str]) -> dict[str, str]:
    """Maps a checkpoint's `keys` to the names to look up in `expected`, all by the stripping with which most fit."""
    wanted = set(expected)
    best = {key: key for key in keys}
    most = sum(name in wanted for name in best.values())
    for strip in _STRIPS:
        names = {key: strip(key) for key in keys}
        fits = sum(name in wanted for name in names.values())
        if fits > most and len(set(names.values())) == len(names):
            best, most = names, fits
    return best


_STRIPS: tuple[Callable[[str], str], ...] = (
    clean_name,
    lambda key: clean_name(key).removeprefix("module."),
    lambda key: re.sub(r"^(module\.)+", "", clean_name(key)),
    lambda key: ".".join(part for part in clean_name(key).split(".") if part != "module"),
)
"""In order: the first strips least."""


def common_prefix_fit(keys: Collection[str], expected: Collection[str]) -> str | None:
    """Returns the prefix to remove ("model.") or to add ("+model.") that makes most keys fit, or None."""
    wanted = set(expected)
    for label, shorter, longer in (("", wanted, set(keys)), ("+", set(keys), wanted)):
        prefixes = {key.split(".", 1)[0] + "." for key in longer if "." in key}
        for prefix in sorted(prefixes):
            rest = {key.removeprefix(prefix) for key in longer if key.startswith(prefix)}
            if len(rest & shorter) * 2 > len(wanted):
                return label + prefix
    return None
