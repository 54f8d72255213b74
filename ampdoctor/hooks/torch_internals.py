"""Private names of torch that looking at a loop stands on; `precision.emulation` and `numerics.unseen` have theirs.

| name | since | without it |
| --- | --- | --- |
| `autograd.Variable._execution_engine` | before 1.0 | backwards are not seen: `torch_shims` has `backwards-unseen` |
| `autograd._get_sequence_nr`, `Node._sequence_nr` | 2.1, 1.10 | no node leads to its op: nothing can be traced |
| `_C._current_autograd_node` | 2.1 | as above |
| `_C._current_graph_task_id` | 2.0 | a forward inside a backward cannot be told from the first: nothing can be traced |
| `nn.utils.clip_grad._clip_grads_with_norm_` | 2.6 | gradients that are clipped while scaled are not told |
| `utils._python_dispatch._disable_current_modes` | 1.13 | a look at a tensor would be traced itself |
| `_C._get_dispatch_mode` | 2.2 | `under_fake_tensors` is False: an export in a watched loop is traced |
| `Tensor._version` | 0.4 | inputs that are written to while a step runs are not noticed: nothing can be recorded |
| `overrides._push_mode`, `_pop_mode`, `_C._len_torch_function_stack`, `_get_function_stack_at` | 2.0 | as above |
| `nn.modules.module._global_forward_hooks_with_kwargs` | 2.0 | nothing has to be forgotten there |
| `_C._get_tracing_state` | 1.0 | what `torch.jit.trace` runs is taken for a step |
| `jit._recursive.create_script_module` | 1.3 | `torch.jit.script` fails on a model that is watched |
| `_GLOBAL_DEVICE_CONTEXT` | 2.3 | the fault of `get_default_device` in 2.8 and before; which mode stays outermost |
| `_C._functorch`, `_functorch.pyfunctorch` | 2.0 | what `vmap` and `grad` wrap cannot be looked at |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch.autograd import Variable
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = ["no_modes", "outside_transforms"]

_ENGINE = "_execution_engine"
_WITH_KWARGS = "_global_forward_hooks_with_kwargs"


@dataclass(frozen=True, slots=True)
class Backward:
    """One call of autograd's engine from Python.

    Attributes:
        roots: What is differentiated.
        inputs: Tensors whose gradients were asked for by name; none for all leaves.
        seeds: The gradients that it begins with, or None, one for each root.
        kept: The graph is kept for another backward.
        accumulated: Gradients go to `.grad` (`backward`), and are not returned (`grad`).
    """

    roots: Sequence[Any]
    inputs: Sequence[Any]
    accumulated: bool
    seeds: Sequence[Any] = ()
    kept: bool = False


SeenBackward = Callable[[Backward, Callable[[], Any]], Any]
"""Called in place of a backward, with a function that runs it; returns what that returned."""


class _SeenEngine:
    """Stands before autograd's engine; what is not `run_backward` is the engine's own."""

    def __init__(self, engine: Any, seen: SeenBackward) -> None:
        self._engine = engine
        self.seen: SeenBackward | None = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        seen = self.seen
        if seen is None:
            return self._engine.run_backward(roots, *args, **kwargs)
        seeds, kept, _, inputs = (*args, (), False, False, ())[:4] if len(args) < 4 else args[:4]
        backward = Backward(roots, inputs, bool(kwargs.get("accumulate_grad")), seeds, bool(kept))
        return seen(backward, lambda: self._engine.run_backward(roots, *args, **kwargs))


@contextmanager
def seen_backwards(seen: SeenBackward) -> Iterator[None]:
    """Every backward that starts in Python goes through `seen`, in every thread; of nested contexts the inner first.

    `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` end in the engine that hangs at `Variable`,
    by whatever name and however early a program has taken hold of them, and DDP and FSDP queue their callbacks there.
    The doors themselves would not do. `from torch.autograd import grad` passes by a door that is replaced later; and
    under a `TorchFunctionMode` `grad` hands itself to the mode, which torch switches off before it calls on: what a
    backward recomputes would lose its names, and only below the doors can the mode be entered again.

    Not seen: backwards that C++ starts (distributed autograd, a LibTorch extension), and those of a compiled graph.
    """
    engine = getattr(Variable, _ENGINE, None)
    if engine is None:
        yield
        return
    before = _SeenEngine(engine, seen)
    setattr(Variable, _ENGINE, before)
    try:
        yield
    finally:
        setattr(Variable, _ENGINE, engine)
        before.seen = None  # whoever has taken hold of it keeps it, and not who was told


@dataclass(slots=True, eq=False)
class _Replacement:
    """What stands in the place of an attribute, and what stood there before.

    Attributes:
        ours: It.
        before: What stood there; another replacement, where several are nested.
        owned: The attribute was the owner's own, and not inherited.
        over: Whoever has put it there has no more use for it.
    """

    ours: Any
    before: Any
    owned: bool
    over: bool = False


_REPLACED: dict[tuple[int, str], list[_Replacement]] = {}
"""By `id` of the owner and name, the outermost last; the owner is held by the context that has replaced it."""


@contextmanager
def seen_scripting(seen: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside, `seen` is called in place of the compiling of a module by `torch.jit.script`.

    Args:
        seen: Called with the module and a function that compiles it; returns what that returned.
    """
    owner: Any = getattr(torch.jit, "_recursive", None)
    compiles = getattr(owner, "create_script_module", None)
    if compiles is None:
        yield
        return
    over = False

    def create_script_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        if over:
            return compiles(module, *args, **kwargs)
        return seen(module, lambda: compiles(module, *args, **kwargs))

    with replaced(owner, "create_script_module", create_script_module):
        try:
            yield
        finally:
            over = True


@contextmanager
def replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """Inside, `owner.name` is ours; afterwards it is what it was, unless somebody has put theirs there since.

    Nested contexts may end in any order: the last one to end puts the original back. Theirs may call ours long
    afterwards, which must then only call on. A module that is imported inside, or a table of torch's, may keep ours
    until the process ends: it must then lead to nothing of the user's.

    Args:
        owner: A class, a module, or an object that has attributes of its own.
        name: Of an attribute.
        ours: What stands in its place.
    """
    own: Any = getattr(owner, "__dict__", {})
    layer = _Replacement(ours, own[name] if name in own else getattr(owner, name), owned=name in own)
    setattr(owner, name, ours)
    key = id(owner), name
    layers = _REPLACED.setdefault(key, [])
    layers.append(layer)
    try:
        yield
    finally:
        layer.over = True
        while layers and layers[-1].over and getattr(owner, "__dict__", {}).get(name) is layers[-1].ours:
            last = layers.pop()
            if last.owned:
                setattr(owner, name, last.before)
            else:
                delattr(owner, name)
        if all(one.over for one in layers):
            _REPLACED.pop(key, None)


@contextmanager
def unseen() -> Iterator[None]:
    """Looks at tensors that neither a mode nor autograd takes part in."""
    with torch._C.DisableTorchFunction(), no_modes(), torch.no_grad():
        yield


def in_backward() -> bool:
    """Autograd's engine is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_node() -> Any:
    """The node whose derivative is being computed on this thread; None outside a backward."""
    return torch._C._current_autograd_node()


def sequence_number() -> int:
    """Autograd's number for the op that it recorded last on this thread."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def sequence_of(node: Any) -> int:
    """The number of the op that a node is the derivative of."""
    return int(node._sequence_nr())


def under_fake_tensors() -> bool:
    """Whether what runs now runs on tensors that hold no values, as while a model is exported or sized."""
    ask = getattr(torch._C, "_get_dispatch_mode", None)
    return ask is not None and ask(torch._C._TorchDispatchModeKey.FAKE) is not None


def of_transform(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a level of `vmap` or `grad`, and must not outlive it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, whatever function transforms (`torch.func`) have made of it."""
    while of_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def default_device() -> torch.device:
    """Where tensors are made; up to torch 2.8 `get_default_device` raises after `set_default_device(None)`."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def reset_default_device() -> None:
    """Make tensors on the CPU again, and leave nothing behind at which `get_default_device` raises up to torch 2.8."""
    torch.set_default_device(None)
    try:
        torch.get_default_device()
    except AttributeError:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to; torch has no public way to ask."""
    return int(tensor._version)


def put_outermost(mode: TorchFunctionMode) -> None:
    """Put a mode around those that are in place: who leaves a mode takes the innermost away, whichever that is.

    Only the device of `torch.set_default_device` stays farther out, where torch asks for it.
    """
    inner = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    if inner and inner[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _push_mode(inner.pop())
    for one in (mode, *reversed(inner)):
        _push_mode(one)


def take_away(mode: TorchFunctionMode) -> bool:
    """Take a mode away from among the others; False where it is not in place, as while it is told of a function."""
    depth = torch._C._len_torch_function_stack()
    if not any(torch._C._get_function_stack_at(place) is mode for place in range(depth)):
        return False
    for one in reversed([_pop_mode() for _ in range(depth)]):
        if one is not mode:
            _push_mode(one)
    return True


def forget_hook(hook: Any) -> None:
    """Take the number of a removed global forward hook out of the table in which torch leaves it."""
    getattr(modules, _WITH_KWARGS, {}).pop(hook.id, None)


def transforms() -> bool:
    """Whether what runs now is traced by `torch.jit`, or runs under `vmap` or `grad`: its tensors must not be kept."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def shims() -> dict[str, str]:
    """What this torch lacks of the above, by a short name, each with a sentence."""
    if hasattr(Variable, _ENGINE):
        return {}
    return {"backwards-unseen": "This torch does not show where a backward begins: a loss is judged by its gradients."}
