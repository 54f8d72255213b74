"""The names of a loop's models in one module that holds them, and instructions that speak of tensors by other names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.nested import map_kind
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    Given,
    Held,
    Instruction,
    Op,
    Reference,
    Scaled,
    references,
)


def prefixed(roots: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the models with what their names begin with in `together`.

    Of several by one name the newest has it: the loop's variable, as that of a function that trains twice, is that one.
    """
    if len(roots) == 1:
        yield "", roots[0][1]
        return
    taken: list[str] = []
    for name, _ in reversed(roots):
        free = name.replace(".", "_") or "model"
        while free in taken or hasattr(nn.Module, free):
            free += "_"
        taken.append(free)
    yield from zip(reversed(taken), (root for _, root in roots), strict=True)


def together(roots: list[tuple[str, nn.Module]]) -> nn.Module:
    """Returns the model, or a module that is never called and has several as children, under their names."""
    named = list(prefixed(roots))
    if len(named) == 1:
        return named[0][1]
    holder = nn.Module()
    for name, root in named:
        holder.add_module(name, root)
    return holder


def renumbered(instruction: Instruction, indices: Mapping[int, int]) -> Instruction:
    """The instruction, with given tensors by their place in the program."""

    def other(reference: Any) -> Any:
        return Given(indices[reference.index]) if isinstance(reference, Given) else reference

    return _with_references(instruction, other)


def spoken(instruction: Instruction, renamed: Callable[[str], str]) -> Instruction:
    """The instruction, with models, parameters and buffers by other names; itself where it speaks of none."""
    if isinstance(instruction, Call):
        instruction = replace(instruction, model=renamed(instruction.model))
    if any(isinstance(reference, Held) for reference in references(instruction)):
        return _with_references(instruction, lambda one: Held(renamed(one.name)) if isinstance(one, Held) else one)
    return instruction


def _with_references(instruction: Instruction, other: Callable[[Any], Any]) -> Instruction:
    if isinstance(instruction, Call | Op):
        args, kwargs = (map_kind(Reference, other, part) for part in (instruction.args, instruction.kwargs))
        return replace(instruction, args=args, kwargs=kwargs)
    if isinstance(instruction, Scaled):
        return replace(instruction, loss=other(instruction.loss))
    if isinstance(instruction, Ended):
        return replace(instruction, value=other(instruction.value))
    if isinstance(instruction, Clipped):
        return replace(instruction, parameters=tuple(map(other, instruction.parameters)))
    if isinstance(instruction, Backward):
        roots, seeds, inputs = (
            tuple(map(other, p)) for p in (instruction.roots, instruction.seeds, instruction.inputs)
        )
        return replace(instruction, roots=roots, seeds=seeds, inputs=inputs)
    return instruction


def named_groups(optimizer_name: str, optimizer: Any, names: Mapping[int, str]) -> list[list[tuple[str, torch.Tensor]]]:
    """Each parameter of each of an optimizer's groups, with its name.

    Args:
        optimizer_name: Which names those of a parameter that has none.
        optimizer: The optimizer.
        names: Of parameters, by their id.
    """
    return [
        [(names.get(id(p), f"{optimizer_name}.group{g}.param{i}"), p) for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]
