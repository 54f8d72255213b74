"""One process of a distributed training: it joins a group of its own, with any backend that the code names.

A group that was made here stays until it is left here (`lasting_emulation`). The run that was built with it needs it in
every piece of user code, even if a factory ends with `destroy_process_group()`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from ampdoctor.errors import ReplayError
from ampdoctor.precision.fake_gpu.replace import Replacements, sees_cuda, what_is_shared

_DIST: Any = dist
_LAUNCHED: Final = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # the environment that torchrun sets for one process


class _Group:
    ours: Any = None  # the process group that was made here
    users: int = 0  # the number of open contexts


def leave_group() -> None:
    """Leave the group that was made here, if the process is still in it."""
    ours, _Group.ours = _Group.ours, None
    if ours is not None and dist.is_initialized() and dist.group.WORLD is ours:
        dist.destroy_process_group()


class OneProcess:
    """The replaced functions of `torch.distributed`."""

    __slots__ = ("_active",)

    def __init__(self, active: Callable[[], bool]) -> None:
        self._active = active

    def declare(self, replacements: Replacements) -> None:
        if not dist.is_available():
            return
        for module in (dist, distributed_c10d):
            replacements.want(module, "init_process_group", self._init)
            replacements.want(module, "destroy_process_group", self._destroy)
        replacements.want(DistributedDataParallel, "__init__", self._wrap)
        replacements.want(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", self._convert)
        replacements.want(type(os.environ), "__getitem__", self._variable)

    def _init(self, original: Any) -> Any:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if not self._active() or (dist.is_initialized() and dist.group.WORLD is not _Group.ours):
                original(*args, **kwargs)
                return
            world_size = args[3] if len(args) > 3 else kwargs.get("world_size", -1)
            _refuse_others(world_size)
            if not dist.is_initialized():  # a factory may be called again
                original("gloo", store=_DIST.HashStore(), rank=0, world_size=1)
                _Group.ours = dist.group.WORLD

        return init_process_group

    def _destroy(self, original: Any) -> Any:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            ours = _Group.ours is not None and group in (None, _Group.ours)
            if not (self._active() and ours):  # replayed steps still need it
                original(group)

        return destroy_process_group

    def _wrap(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(  # noqa: N807 - replaces a method of that name
            ddp: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            if self._active():
                device_ids = output_device = None
            original(ddp, module, device_ids, output_device, *args, **kwargs)

        return __init__

    def _convert(self, original: Any) -> Any:
        @classmethod  # type: ignore[misc]
        @functools.wraps(original)
        def convert_sync_batchnorm(_cls: Any, module: Any, process_group: Any = None) -> Any:
            # In one process it is the plain batch norm.
            return module if self._active() else original(module, process_group)

        return convert_sync_batchnorm

    def _variable(self, original: Any) -> Any:
        @functools.wraps(original)
        def __getitem__(environ: Any, key: Any) -> Any:  # noqa: N807 - replaces a method of that name
            try:
                return original(environ, key)
            except KeyError:
                # `os.environ["LOCAL_RANK"]` fails without it. `.get()` and `in` check whether torchrun has started the
                # process: they pass through a frame of the standard library, and find nothing.
                if self._active() and key in _LAUNCHED and sees_cuda(sys._getframe(1)):
                    return _LAUNCHED[key]
                raise

        return __getitem__


def _refuse_others(world_size: int) -> None:
    world_size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ReplayError(
            f"the code joins a group of {world_size} processes, and a replay is one: "
            "let it join with world_size=1, or without WORLD_SIZE"
        )


# -- process-wide state of emulated code --


@contextmanager
def lasting_emulation() -> Iterator[None]:
    """Keep the process group that code joins inside, and Accelerate's state, until the outermost context ends."""
    put_back = what_is_shared() if not _Group.users else None
    _Group.users += 1
    try:
        yield
    finally:
        _Group.users -= 1
        if put_back is not None:
            leave_group()
            put_back()
