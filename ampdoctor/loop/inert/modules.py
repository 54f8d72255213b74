"""Modules as what they hold, so that they are put together again without their constructors."""
# ruff: noqa: SLF001 - what a module keeps of itself has no public name

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ampdoctor.loop.inert.reading import FindClass, UnreadableTreeError, read
from ampdoctor.loop.inert.writing import NotInertError, Tree, class_name, written

_OWN = frozenset(vars(nn.Module()))
"""What every module keeps of itself."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def module_written(module: nn.Module, child: Callable[[nn.Module], Tree]) -> dict[str, Tree]:
    """Returns a module's class, its attributes, the names of its tensors and its parts; no tensor's values.

    Args:
        module: The module.
        child: Writes a module inside it.

    Raises:
        NotInertError: An attribute cannot be written; its class is nowhere by its name; it has hooks.
    """
    cls = type(module)
    there: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        there = getattr(there, name, None)
    if there is not cls:
        raise NotInertError(f"a {cls.__qualname__}, which is nowhere by that name")
    hooks = [hook for name in _HOOKS for hook in getattr(module, name).values()]
    if not all(str(getattr(hook, "__module__", "")).startswith("ampdoctor.") for hook in hooks):
        raise NotInertError(f"hooks on a {cls.__qualname__}")
    if any(p is not None and type(p) is not nn.Parameter for p in module._parameters.values()):
        raise NotInertError(f"parameters of a kind of their own in a {cls.__qualname__}")
    return {
        "class": class_name(cls),
        "fields": {name: written(value) for name, value in vars(module).items() if name not in _OWN},
        "parameters": {name: None if p is None else list(p.shape) for name, p in module._parameters.items()},
        "buffers": list(module._buffers),
        "modules": {name: None if part is None else child(part) for name, part in module._modules.items()},
    }


def module_read(
    tree: Mapping[str, Any], cls: type[nn.Module], find: FindClass, child: Callable[[Any], nn.Module]
) -> nn.Module:
    """Returns a module of a class that holds what was written; its tensors have no values yet, its buffers are None.

    Args:
        tree: As `module_written` returns it; nothing in it is trusted.
        cls: The class that it names.
        find: Finds the classes of values.
        child: Reads a module inside it.

    Raises:
        UnreadableTreeError: It is no such tree, or holds what cannot be read.
    """
    module: nn.Module = object.__new__(cls)
    nn.Module.__init__(module)
    try:
        for name, value in tree["fields"].items():
            if name in _OWN or hasattr(nn.Module, name):
                raise UnreadableTreeError(f"an attribute {name[:40]!r}, which is every module's own")
            vars(module)[name] = read(value, find)
        for name, shape in tree["parameters"].items():
            module._parameters[_part(name)] = None if shape is None else nn.Parameter(torch.empty(shape))
        for name in tree["buffers"]:
            module._buffers[_part(name)] = None
        for name, part in tree["modules"].items():
            module._modules[_part(name)] = None if part is None else child(part)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise UnreadableTreeError(f"parts that do not fit ({type(error).__name__})") from None
    return module


def _part(name: Any) -> str:
    """The name of a part: it is put where a module keeps it, as `register_parameter` may be the user's own."""
    if not isinstance(name, str) or not name or "." in name or hasattr(nn.Module, name):
        raise UnreadableTreeError(f"a part of the name {str(name)[:40]!r}")
    return name
