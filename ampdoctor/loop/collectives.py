"""Collectives of `torch.distributed`: whether there is anybody to run them with, and a guard that refuses them.

A look at one rank's step runs code that the other ranks do not run. A collective that one rank starts alone hangs the
job, or pairs with another one of a rank that is further: none may be started, by whatever way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.errors import CollectiveError

_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
)
"""Of the ops that communicate: each way that torch has ends in one of them, the reducer's of DDP in C++ as well."""
_LOCAL = ("wait_tensor", "wrap_tensor")
"""In the names of those that only wait for, or mark, what was started before."""
_PAST_DISPATCH = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("allgather", "_allgather_base", "allgather_coalesced", "gather", "scatter", "alltoall", "alltoall_base"),
    *("send", "recv", "recv_anysource", "barrier", "monitored_barrier", "_start_coalescing", "shrink"),
)
"""Methods of torch's `Backend` in C++: who takes it out of its group (`group._get_backend(device)`) calls no op."""
_NEW_GROUP = "_new_group_with_tag"
"""Of `torch.distributed.distributed_c10d`, since 2.0: waits for the others at the store, and is no op."""


def are_joined() -> bool:
    """Whether this process is in a process group, be it of one."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def are_several() -> bool:
    """Whether other processes are in this one's process group, and may have a part in its gradients."""
    return are_joined() and torch.distributed.get_world_size() > 1


def is_by_horovod() -> bool:
    """Whether other processes have a part in the gradients by Horovod, whose collectives are not torch's."""
    horovod: Any = sys.modules.get("horovod.torch")
    try:
        return horovod is not None and horovod.size() > 1
    except ValueError:  # it has not been initialised
        return False


@contextmanager
def refused() -> Iterator[None]:
    """Inside, a collective that this thread, or a backward of it, would start raises before it is launched.

    What other threads do is not touched. Where there is no process group nothing is in place.

    Raises:
        CollectiveError: What runs inside starts one.
    """
    if not are_joined():
        yield
        return
    with _Refusing(), _without_what_is_no_op():
        yield


class _Refusing(TorchDispatchMode):
    """`ProcessGroup`'s methods, functional collectives and DDP's reducer all go by the dispatcher."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace = getattr(func, "namespace", "")
        if namespace in _NAMESPACES and not any(name in str(func) for name in _LOCAL):
            raise CollectiveError(_sentence(str(func).removesuffix(".default")))
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_what_is_no_op() -> Iterator[None]:
    """Inside, this thread starts no collective past the dispatcher, as far as this torch has the ways for it."""
    from torch._C import _distributed_c10d as in_c
    from torch.distributed import distributed_c10d

    ways: list[tuple[Any, str]] = [(in_c.Backend, name) for name in _PAST_DISPATCH]
    ways += [(in_c.ProcessGroup, "_start_coalescing"), (distributed_c10d, _NEW_GROUP)]
    with ExitStack() as stack:
        for owner, name in ways:
            if name in vars(owner):
                stack.enter_context(_refusing(owner, name))
        yield


@contextmanager
def _refusing(owner: Any, name: str) -> Iterator[None]:
    made, here = getattr(owner, name), threading.get_ident()

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            raise CollectiveError(_sentence(name.lstrip("_")))
        return made(*args, **kwargs)

    setattr(owner, name, refusing)
    try:
        yield
    finally:
        if getattr(owner, name) is refusing:
            setattr(owner, name, made)


def _sentence(what: str) -> str:
    return (
        f"the step runs a collective ({what}), which one rank must not run alone: it can be run again where all ranks "
        "run it, and not here"
    )
