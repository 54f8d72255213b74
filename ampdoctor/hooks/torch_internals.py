"""The private names of torch that are used to watch a loop; `precision` lists those that its emulation uses.

| name | since | without it |
| --- | --- | --- |
| `autograd.Variable._execution_engine` | before 1.0 | backwards are not seen: `torch_shims` has `backwards-unseen` |
| `autograd._get_sequence_nr`, `Node._sequence_nr` | 2.1, 1.10 | a node's op is unknown: nothing can be traced |
| `_C._current_autograd_node` | 2.1 | as above |
| `_C._current_graph_task_id` | 2.0 | a forward inside a backward cannot be told from the first: nothing can be traced |
| `nn.utils.clip_grad._clip_grads_with_norm_` | 2.6 | gradients that are clipped while scaled are not reported |
| `utils._python_dispatch._disable_current_modes` | 1.13 | our own reads of tensors would be traced |
| `_len_torch_dispatch_stack`, `_len_torch_dispatch_stack_pre_dispatch` | 2.1 | as above |
| `_C._get_dispatch_mode` | 2.2 | `under_fake_tensors` is False: an export in a watched loop is traced |
| `Tensor._version` | 0.4 | inputs that are written to while a step runs are not noticed: nothing can be recorded |
| `overrides._push_mode`, `_pop_mode`, `_C._len_torch_function_stack`, `_get_function_stack_at` | 2.0 | as above |
| `nn.modules.module._global_forward_hooks_with_kwargs` | 2.0 | nothing has to be removed there |
| `_C._get_tracing_state` | 1.0 | code under `torch.jit.trace` counts as a step |
| `jit._recursive.create_script_module` | 1.3 | `torch.jit.script` fails on a model that is watched |
| `_GLOBAL_DEVICE_CONTEXT` | 2.3 | the fault of `get_default_device` in 2.8 and before; which mode stays outermost |
| `_C._functorch`, `_functorch.pyfunctorch` | 2.0 | tensors inside `vmap` and `grad` cannot be read |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import Variable
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_ENGINE = "_execution_engine"
_WITH_KWARGS = "_global_forward_hooks_with_kwargs"


@dataclass(frozen=True, slots=True)
class Backward:
    """One call of autograd's engine from Python."""

    roots: Sequence[Any]
    inputs: Sequence[Any]  # the tensors whose gradients were requested; all leaves if empty
    accumulated: bool  # gradients are added to `.grad` (`backward`), not returned (`grad`)
    seeds: Sequence[Any] = ()  # the initial gradient, or None, for each root
    kept: bool = False  # the graph is retained


SeenBackward = Callable[[Backward, Callable[[], Any]], Any]
"""Called instead of a backward, with a function that runs it; returns its result."""


class _SeenEngine:
    """Wraps autograd's engine; all attributes but `run_backward` are the engine's own."""

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
    """Passes every backward that starts in Python, in any thread, to `seen`; of nested contexts the inner is first."""
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
        before.seen = None  # a program may keep our engine: it must not keep `seen` alive


@dataclass(slots=True, eq=False)
class _Replacement:
    ours: Any
    before: Any  # the value before; another replacement's, where several are nested
    owned: bool  # the attribute was in the owner's own `__dict__`
    over: bool = False  # its context has ended


_REPLACED: dict[tuple[int, str], list[_Replacement]] = {}
"""By `id` of the owner and name, the outermost last; the context keeps the owner alive."""


@contextmanager
def seen_scripting(seen: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Calls `seen` where `torch.jit.script` compiles a module, with the module and a function that compiles it."""
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
    """Sets `owner.name` to `ours` inside; restores it unless others have replaced it. Contexts may end in any order."""
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


def no_modes() -> AbstractContextManager[Any]:
    """Takes all dispatch modes away; torch's own context takes five microseconds where there are none."""
    active = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if active else nullcontext()


class unseen(ContextDecorator):  # noqa: N801 - as `torch.no_grad`
    """Reads tensors without any mode and without autograd."""

    def __enter__(self) -> None:
        self._functions, self._gradients = torch._C.DisableTorchFunction(), torch.is_grad_enabled()
        self._functions.__enter__()
        torch._C._set_grad_enabled(False)  # `torch.no_grad` takes as long as all the rest
        self._modes = no_modes()
        self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036 - handed on
        self._modes.__exit__(*error)
        torch._C._set_grad_enabled(self._gradients)
        self._functions.__exit__(*error)

    def _recreate_cm(self) -> unseen:
        return unseen()  # a decorated function may call itself, and run on several threads


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_node() -> Any:
    """Returns the node whose derivative is being computed on this thread; None outside a backward."""
    return torch._C._current_autograd_node()


def sequence_number() -> int:
    """Returns autograd's number of the op that it recorded last on this thread."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


def sequence_of(node: Any) -> int:
    """Returns the number of the op of which a node is the derivative."""
    return int(node._sequence_nr())


def under_fake_tensors() -> bool:
    """Whether the running code computes on tensors without values, as in an export."""
    ask = getattr(torch._C, "_get_dispatch_mode", None)
    return ask is not None and ask(torch._C._TorchDispatchModeKey.FAKE) is not None


def of_transform(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a level of `vmap` or `grad`, and must not outlive it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def default_device() -> torch.device:
    """Returns the default device; up to torch 2.8 `get_default_device` raises after `set_default_device(None)`."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def reset_default_device() -> None:
    """Resets the default device to the CPU, in a way that `get_default_device` does not raise up to torch 2.8."""
    torch.set_default_device(None)
    try:
        torch.get_default_device()
    except AttributeError:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns a tensor's version counter, which rises with each write; torch has no public way to read it."""


class FunctionMode(TorchFunctionMode):
    """Hands each of torch's functions, with its arguments, to `called`, which calls it."""

    def __init__(self, called: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():  # it would become part of the graph
            return func(*args, **(kwargs or {}))
        return self._called(func, args, kwargs or {})


def put_outermost(mode: TorchFunctionMode) -> None:
    """Puts a mode around the active ones; only that of `torch.set_default_device` stays farther out."""
    inner = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    if inner and inner[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _push_mode(inner.pop())
    for one in (mode, *reversed(inner)):
        _push_mode(one)


def take_away(mode: TorchFunctionMode) -> bool:
    """Removes a mode from among the others; False where it is not active, as while it handles a function."""
    depth = torch._C._len_torch_function_stack()
    if not depth or mode not in map(torch._C._get_function_stack_at, range(depth)):
        return False
    for one in reversed([_pop_mode() for _ in range(depth)]):
        if one is not mode:
            _push_mode(one)
    return True


def forget_hook(hook: Any) -> None:
    """Removes the id of a removed global forward hook from a table in which torch leaves it."""
    getattr(modules, _WITH_KWARGS, {}).pop(hook.id, None)


def transforms() -> bool:
    """Whether the running code is traced by `torch.jit`, or under `vmap` or `grad`: its tensors must not be kept."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def shims() -> dict[str, str]:
    """Returns the names above that this torch lacks, by a short name, each with a sentence."""
    if hasattr(Variable, _ENGINE):
        return {}
    return {"backwards-unseen": "This torch does not show where a backward begins: a loss is judged by its gradients."}
