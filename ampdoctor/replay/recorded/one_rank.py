"""One rank's model on its own: what its wrappers have to say to the other ranks is left unsaid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from ampdoctor.errors import CollectiveError
from ampdoctor.hooks.process_state import are_joined, is_by_horovod, is_ours, refused

_DDP, _FSDP = "DistributedDataParallel", ("FullyShardedDataParallel", "FSDPModule")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def lies_in_parts(model: nn.Module) -> str | None:
    """Returns how the parameters of a model lie in parts on several processes; None where each lies here whole.

    Such a model can run only where all of its processes do.
    """
    for module in model.modules():
        if _is_a(module, *_FSDP):
            return "FSDP"
        if _is_a(module, _DDP) and getattr(module, "mixed_precision", None) is not None:
            return "DDP's own mixed precision"
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, "ds_id"):
            return "DeepSpeed's ZeRO-3"
        if hasattr(tensor, "to_local"):
            return "DTensor"
    return None


@contextmanager
def on_its_own(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Inside, a step of the model is this rank's alone, and a collective raises before it is launched.

    DDP runs the module that it wraps, and its reducer takes no part: it counts the calls and the gradients of a step,
    and what a second run of one had counted would be wrong in the next. Its hooks hang on the parameters' autograd
    state; inside, each parameter has another one, over the same memory. The loop's own gradient hooks are left out in
    the same way, as they may communicate. `SyncBatchNorm` normalises by this rank's own statistics.

    Yields:
        What is left out, in sentences; nothing where there is no process group.

    Raises:
        CollectiveError: The processes are joined by Horovod, whose optimizer communicates in the backward.
    """
    if is_by_horovod():
        raise CollectiveError(
            "the job's processes are joined by Horovod, whose collectives cannot be left out: the step can be run "
            "again where all of them run it, and not here"
        )
    if not are_joined():
        yield ()
        return
    said = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if _is_a(module, _DDP):
                stack.enter_context(_instead(module, _pre_forward=_moved(module), _post_forward=_as_it_is))
            elif isinstance(module, SyncBatchNorm):
                said.append(f"{name or 'the model'} (SyncBatchNorm) took the statistics of this rank's batch alone")
                stack.enter_context(_instead(module, forward=_local_norm(module)))
        hooked = [name for name, p in model.named_parameters() if stack.enter_context(_without_hooks(p))]
        if hooked:
            said.append(
                f"gradient hooks of the loop's own were not run, as they may communicate: on {hooked[0]}"
                + (f" and {len(hooked) - 1} more" if len(hooked) > 1 else "")
            )
        stack.enter_context(refused())
        yield tuple(said)


def _is_a(module: nn.Module, *names: str) -> bool:
    """By name: the wrappers' own modules are slow to import, and may be unavailable."""
    return any(cls.__name__ in names and cls.__module__.startswith("torch.") for cls in type(module).__mro__)


@contextmanager
def _instead(module: nn.Module, **methods: Any) -> Iterator[None]:
    own = vars(module)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del own[name]
        own.update(before)


def _moved(ddp: Any) -> Any:
    """DDP's step before a forward, without what concerns other ranks: inputs go to its device."""

    def moved(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not ddp.device_ids:
            return args, kwargs
        from torch.distributed.utils import _to_kwargs

        device = torch.device(ddp.device_type, ddp.device_ids[0])
        inputs, named = _to_kwargs(args, kwargs, device, ddp.use_side_stream_for_tensor_copies)
        return inputs[0], named[0]

    return moved


def _as_it_is(output: Any) -> Any:
    return output


def _local_norm(module: SyncBatchNorm) -> Any:
    return lambda given: _BatchNorm.forward(module, given)


@contextmanager
def _without_hooks(parameter: torch.Tensor) -> Iterator[bool]:
    """Inside, the parameter has a gradient and hooks of its own, and shares its values and their version.

    Yields:
        Whether the loop has hung hooks on it.
    """
    if type(parameter) not in (nn.Parameter, torch.Tensor) or not parameter.requires_grad:
        yield False
        return
    hooks = {name: getattr(parameter, name) for name in _HOOKS}
    other = nn.Parameter(parameter.detach())
    torch._C._swap_tensor_impl(parameter, other)  # noqa: SLF001 - torch has no other way to leave a reducer out
    _hang(parameter, dict.fromkeys(_HOOKS))
    try:
        yield any(not is_ours(hook) for hung in hooks.values() for hook in (hung or {}).values())
    finally:
        torch._C._swap_tensor_impl(parameter, other)  # noqa: SLF001
        _hang(parameter, hooks)


def _hang(parameter: torch.Tensor, hooks: dict[str, Any]) -> None:
    for name, hung in hooks.items():
        if getattr(parameter, name) is not hung:
            setattr(parameter, name, hung)
