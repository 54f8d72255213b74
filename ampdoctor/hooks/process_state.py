"""Process-wide state beside the loop: random generators, warnings, switches of torch, the process group."""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.errors import CollectiveError
from ampdoctor.hooks.torch_internals import replaced

# -- random generators --


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every random generator that training code commonly draws from."""

    python: Any
    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    numpy: Any
    own: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def capture(cls, generators: tuple[torch.Generator, ...] = (), like: RandomState | None = None) -> RandomState:
        """Copies the states of the global generators and of `generators`; equal parts are shared with `like`."""
        import numpy as np

        # reading a state would initialize CUDA: it takes GPU memory, and forked processes could not use CUDA
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        python, cpu = random.getstate(), torch.get_rng_state()
        numpy = np.random.get_state()  # noqa: NPY002 - user code draws from the global one
        if like is not None:
            python = like.python if like.python == python else python
            cpu = like.torch_cpu if torch.equal(like.torch_cpu, cpu) else cpu
            numpy = like.numpy if _same_numpy(like.numpy, numpy) else numpy
        return cls(python, cpu, cuda, numpy, tuple((own, own.get_state()) for own in generators))

    def restore(self) -> None:
        """Restores the generators' states."""
        import numpy as np

        random.setstate(self.python)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(list(self.torch_cuda))
        elif torch.cuda.is_initialized():  # initialized since: reset it to its start, with the CPU's seed
            torch.cuda.manual_seed_all(torch.initial_seed())
        np.random.set_state(self.numpy)  # noqa: NPY002 - see capture
        for own, state in self.own:
            own.set_state(state)


def _same_numpy(here: Any, there: Any) -> bool:
    """Whether two states of numpy's global generator are equal: its name, its words, and three numbers."""
    import numpy as np

    return all(
        np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
        for mine, theirs in zip(here, there, strict=True)
    )


# -- switches of torch that would hide a step's ops, or end the step early: off in a replay --


@contextmanager
def no_anomaly_mode() -> Iterator[None]:
    """Keeps anomaly mode off inside, even if the user's code turns it on; restores it afterwards."""
    enabled, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False, checks_nan)
    try:
        with replaced(torch, "set_anomaly_enabled", lambda *_args, **_kwargs: None):
            yield
    finally:
        torch.set_anomaly_enabled(enabled, checks_nan)


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Runs attention layers unfused, as written: a trace switches torch's fusion off anyway, and that changes bits."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# -- collectives of `torch.distributed`: refused inside a look --
#
# A look at one rank's step runs code that the other ranks do not run. A collective that one rank starts alone hangs the
# job, or pairs with another collective of a rank that is further ahead: so none may be started, in any way.

_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
)
"""Namespaces of the ops that communicate: all ways of torch end in one of them, also DDP's reducer in C++."""
_LOCAL = ("wait_tensor", "wrap_tensor")
"""In the names of those that only wait for, or mark, what was started before."""
_GROUPS = ("group_name", "process_group")
"""Names of arguments that say with whom an op communicates, in any namespace."""
_RETURNS_WORK = re.compile(r"-> \S*\bWork\b")
"""In the signature of a method in C++: a method that starts a collective returns its `Work`."""
_WITHOUT_WORK = ("monitored_barrier", "_start_coalescing", "shrink")
"""Methods that communicate, or begin to, and return no `Work`."""
_NEW_GROUP = "_new_group_with_tag"
"""Of `torch.distributed.distributed_c10d`, since 2.0: waits for the others at the store, and is no op."""


def are_joined() -> bool:
    """Whether this process is in a process group, perhaps of one."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def are_several() -> bool:
    """Whether this process's group has other processes, which may share its gradients."""
    return are_joined() and torch.distributed.get_world_size() > 1


def is_by_horovod() -> bool:
    """Whether other processes share the gradients by Horovod, whose collectives are not torch's."""
    horovod: Any = sys.modules.get("horovod.torch")
    try:
        return horovod is not None and horovod.size() > 1
    except ValueError:  # it has not been initialised
        return False


@contextmanager
def refused() -> Iterator[None]:
    """Raises CollectiveError, before the launch, where this thread, or a backward of it, starts a collective inside."""
    if not are_joined():
        yield
        return
    with _Refusing(), _without_what_is_no_op():
        yield


class _Refusing(TorchDispatchMode):
    """Functional collectives and DDP's reducer go by the dispatcher, outside an op that is written in Python."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _communicates(func):
            raise CollectiveError(_sentence(str(func).removesuffix(".default")))
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=4096)
def _communicates(func: Any) -> bool:
    if any(name in str(func) for name in _LOCAL):
        return False
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    of_group = any(one.name in _GROUPS or "ProcessGroup" in str(one.type) for one in arguments)
    return of_group or getattr(func, "namespace", "") in _NAMESPACES


@contextmanager
def _without_what_is_no_op() -> Iterator[None]:
    """Inside, this thread starts no collective past the dispatcher: by a group's or its backend's own methods."""
    from torch._C import _distributed_c10d as in_c
    from torch.distributed import distributed_c10d

    ways: list[tuple[Any, str]] = [(distributed_c10d, _NEW_GROUP)]
    for owner in (in_c.Backend, in_c.ProcessGroup):
        methods = [(name, getattr(method, "__doc__", None) or "") for name, method in vars(owner).items()]
        ways += [(owner, name) for name, said in methods if name in _WITHOUT_WORK or _RETURNS_WORK.search(said)]
    with ExitStack() as stack:
        for owner, name in ways:
            if name in vars(owner):
                stack.enter_context(_refusing(owner, name))
        yield


@contextmanager
def _refusing(owner: Any, name: str) -> Iterator[None]:
    made, here = getattr(owner, name), threading.get_ident()
    stored = vars(owner)[name]  # in a class of pybind's a descriptor; what `getattr` gives binds no instance any more

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            raise CollectiveError(_sentence(name.lstrip("_")))
        return made(*args, **kwargs)

    setattr(owner, name, refusing)
    try:
        yield
    finally:
        if vars(owner).get(name) is refusing:
            setattr(owner, name, stored)


def _sentence(what: str) -> str:
    return (
        f"the step runs a collective ({what}), which one rank must not run alone: it can be run again where all ranks "
        "run it, and not here"
    )


# -- warnings: a watch adds none, hides none, and repeats none --

_CHANGED = ("_filters_mutated", "_filters_mutated_lock_held")
"""Functions that `warnings` calls when its filters change, up to Python 3.13 and from 3.14 on."""
_ANY_GLOBAL = "_has_any_global_hook"
"""Function of `torch.nn.modules.module`: a compiled module calls it, and warns where it returns True."""
_GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


class _OnThisThread:
    """The text pattern of a warnings filter: matches any text, but only on this thread."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def match(self, _: str) -> bool:
        return threading.get_ident() == self._thread


@contextmanager
def unwarned() -> Iterator[None]:
    """Hides this thread's warnings inside, and does not count them as shown."""
    ours = ("ignore", _OnThisThread(), Warning, None, 0)
    lists = [_filters()]
    with ExitStack() as stack:
        for name in _CHANGED:
            if hasattr(warnings, name):
                stack.enter_context(_unchanged(name))
        lists[0].insert(0, ours)
        try:
            yield
        finally:
            lists.append(_filters())  # another thread may have replaced the list by a copy
            for filters in lists:
                if ours in filters:
                    filters.remove(ours)


@contextmanager
def unwarned_of_hooks() -> Iterator[None]:
    """Lets a compiled module warn of global hooks only where some are not ampdoctor's."""
    before = getattr(modules, _ANY_GLOBAL, None)
    if before is None:
        yield
        return
    with replaced(modules, _ANY_GLOBAL, _has_hooks_of_others):
        yield


def is_ours(hook: Any) -> bool:
    """Whether a hook is ampdoctor's."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _has_hooks_of_others() -> bool:
    return any(not is_ours(hook) for name in _GLOBAL for hook in getattr(modules, name, {}).values())


def _filters() -> list[Any]:
    return warnings.filters  # type: ignore[return-value]  # a list, where the stubs have a sequence


@contextmanager
def _unchanged(name: str) -> Iterator[None]:
    changed, here, over = getattr(warnings, name), threading.get_ident(), False

    def told() -> None:
        if over or threading.get_ident() != here:
            changed()

    with replaced(warnings, name, told):
        try:
            yield
        finally:
            over = True
