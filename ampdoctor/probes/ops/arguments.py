"""What an op reads, writes and returns: in one piece, or element by element for a `_foreach_` op over lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ampdoctor.probes.ops.naming import reads_layout, reshapes
from ampdoctor.probes.ops.sites import Site
from ampdoctor.probes.ops.tensors import is_watched, tensors_in

_RUNNING = ("running_mean", "running_var")
_UNDECLARED_WRITES = {"native_batch_norm": _RUNNING, "cudnn_batch_norm": _RUNNING, "miopen_batch_norm": _RUNNING}
"""Kernels that update tensors in place although their schema does not say so (torch 2.13, `native_functions.yaml`)."""


@dataclass(frozen=True, slots=True)
class Split:
    """One op call, or one element of a call over lists of tensors.

    Attributes:
        reads: Floating-point tensors whose values the op reads.
        before: The same, with the values they had before the op ran.
        args: Positional arguments, with the values they had before.
        kwargs: Keyword arguments, likewise.
        writes: Floating-point tensors that the op changes in place.
        element: Index in the lists; None for a call in one piece.
        repeatable: The call can be run again on `args` and `kwargs`.
        places: Positions (or names) of the arguments that are written.
        reshapes: It changes a tensor's shape in place and no value: a view, which writes nothing.
    """

    reads: tuple[torch.Tensor, ...]
    before: tuple[torch.Tensor, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: tuple[torch.Tensor, ...]
    element: int | None
    repeatable: bool
    places: tuple[int | str, ...] = ()
    reshapes: bool = False

    @property
    def in_place(self) -> bool:
        """The op wrote into memory that was there before."""
        return bool(self.writes)

    def results(self, result: Any) -> list[torch.Tensor]:
        """The floating-point tensors that hold the call's results: those written in place, then those returned."""
        if self.element is not None:
            returned = result[self.element] if isinstance(result, list | tuple) and len(result) > self.element else ()
        else:
            returned = result
        written = {id(t) for t in self.writes}
        return [*self.writes, *(t for t in tensors_in(returned) if is_watched(t) and id(t) not in written)]

    def again(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Run the call on other arguments of the same structure; its results, parallel to `results`.

        Args:
            func: The op.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        returned = func(*args, **kwargs)
        bound = [args[place] if isinstance(place, int) else kwargs[place] for place in self.places]
        written = [t for value in bound for t in tensors_in(value) if is_watched(t)]
        known = {id(t) for t in written}
        return [*written, *(t for t in tensors_in(returned) if is_watched(t) and id(t) not in known)]

    def substituted(self, substitute: Callable[[torch.Tensor], torch.Tensor | None]) -> Split:
        """The same call with some tensors replaced: by `substitute(tensor)`, where it gives one."""
        originals = {id(b): r for b, r in zip(self.before, self.reads, strict=True)}

        def swap(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            other = substitute(originals.get(id(item), item))
            return item if other is None else other

        return replace(self, args=tree_map(swap, self.args), kwargs=tree_map(swap, self.kwargs))


@dataclass(frozen=True, slots=True)
class Ran:
    """An op that ran.

    Attributes:
        func: The ATen overload.
        kernel: Its name without namespace and overload.
        site: Where it ran.
        call: What it ran on.
        bad: Inputs that were non-finite before it ran.
        results: Its floating-point results.
        returned: What it returned, integers and booleans as well; None for one element of a list.
    """

    func: Any
    kernel: str
    site: Site
    call: Split
    bad: list[torch.Tensor]
    results: list[torch.Tensor]
    returned: Any = None


def split_calls(func: Any, args: Sequence[Any], kwargs: dict[str, Any], overwrites: bool) -> list[Split]:  # noqa: FBT001 - internal
    """Take a call apart before it runs.

    Args:
        func: An ATen overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        overwrites: It does not read what it writes in place.
    """
    named = _bind(func, args, kwargs)
    written = [name for name, is_write, _ in named if is_write]
    lists = [value for _, _, value in named if _is_tensor_list(value)]
    if lists and (written or func.__name__.startswith("_foreach_")) and len({len(v) for v in lists}) == 1:
        return [_element(named, index) for index in range(len(lists[0]))]
    copies: dict[int, torch.Tensor] = {}
    shape_alone = reshapes(func)
    writes = [t for _, is_write, value in named if is_write for t in tensors_in(value) if is_watched(t)]
    if shape_alone:
        copies = {id(t): t.detach() for t in writes}  # aliases, which keep the shape
    elif not overwrites:
        copies = {id(t): t.detach().clone() for t in writes}
    skip = {id(t) for t in writes} if not shape_alone and (overwrites or "out" in written) else set()
    reads = tuple(t for t in tensors_in([*args, *kwargs.values()]) if is_watched(t) and id(t) not in skip)

    def before(item: Any) -> Any:
        return copies.get(id(item), item) if isinstance(item, torch.Tensor) else item

    return [
        Split(
            reads=tuple(before(t) for t in reads) if shape_alone else reads,
            before=tuple(before(t) for t in reads),
            args=tree_map(before, tuple(args)),
            kwargs=tree_map(before, dict(kwargs)),
            writes=() if shape_alone else tuple(writes),
            element=None,
            repeatable="out" not in written and not reads_layout(func),
            places=tuple(
                position if position < len(args) else name
                for position, (name, is_write, value) in enumerate(named)
                if is_write and value is not None and not shape_alone
            ),
            reshapes=shape_alone,
        )
    ]


def _element(named: list[tuple[str, bool, Any]], index: int) -> Split:
    """One element: the same op over lists of one, so that it can be run again."""
    length = next(len(value) for _, _, value in named if _is_tensor_list(value))
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    kwargs: dict[str, Any] = {}
    for name, is_write, value in named:
        if value is None:
            continue  # not given: the schema's default
        if isinstance(value, list | tuple) and len(value) == length:
            kwargs[name] = [value[index]]  # lists of numbers run beside the tensors (`_foreach_div_.ScalarList`)
        elif name == "scalars" and isinstance(value, torch.Tensor):
            kwargs[name] = value[index : index + 1]
        else:
            kwargs[name] = value
        watched = [t for t in tensors_in(kwargs[name]) if is_watched(t)]
        reads += watched
        if is_write:
            writes += watched
    kept = {id(t): t.detach().clone() for t in writes}

    def before(item: Any) -> Any:
        return kept.get(id(item), item) if isinstance(item, torch.Tensor) else item

    return Split(
        reads=tuple(reads),
        before=tuple(before(t) for t in reads),
        args=(),
        kwargs=tree_map(before, kwargs),
        writes=tuple(writes),
        element=index,
        repeatable=True,
        places=tuple(name for name, is_write, value in named if is_write and value is not None),
    )


def _bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, bool, Any]]:
    """(name, written in place, value) of every argument, by the op's schema."""
    bound = []
    undeclared = _UNDECLARED_WRITES.get(func.__name__.partition(".")[0], ())
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        write = argument.alias_info is not None and argument.alias_info.is_write
        write = write or argument.name in undeclared
        bound.append((argument.name, write, value))
    return bound


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(t, torch.Tensor) for t in value)
