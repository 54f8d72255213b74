"""Functions that are called when a loop has a gradient, steps, clips, calls its scaler; and hooks that no copy has."""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ampdoctor.hooks.torch_internals import put_outermost, replaced, seen_scripting, take_away

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


# Hooks on the gradients of tensors, which autograd also calls where there is no gradient.


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
    """`Tensor.register_hook`, of which the hook is told of gradients alone.

    A node of several outputs of which the loss needs one (a compiled model's, an unused chunk's, that of a function
    with `set_materialize_grads(False)`) gives the others an undefined gradient, and torch hands its hooks None.
    """

    def told(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else hook(gradient)

    return tensor.register_hook(told)  # type: ignore[no-any-return]


# Hooks on every optimizer's step, which a program may clear together with its own.


class OptimizerHooks:
    """Hooks before and after the `step` of every optimizer, as long as they are not removed.

    Args:
        before: Called as torch calls `register_optimizer_step_pre_hook`'s.
        after: The same of `register_optimizer_step_post_hook`.
    """

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._hung = (
            (register_optimizer_step_pre_hook, before),
            (register_optimizer_step_post_hook, after),
        )
        self._handles: list[Any] = []

    def hang(self) -> None:
        """Put in place what is not, or is there no more: a program that clears the table of such hooks clears ours."""
        if not self._handles or not all(map(is_in_place, self._handles)):
            self.remove()
            self._handles = [register(hook) for register, hook in self._hung]

    def remove(self) -> None:
        """No hook is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def is_in_place(handle: Any) -> bool:
    """Whether the hook that a handle of torch's (`RemovableHandle`) stands for is in its table still."""
    table = handle.hooks_dict_ref()
    return table is not None and handle.id in table


# Whether a loop has asked a tensor for a number: without one it cannot decide anything by what it has computed.


READS = frozenset(
    {
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
        *("__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"),
    }
)
"""Functions of torch's that give Python a number, or bring a tensor to where NumPy reads it."""


class NumberReads:
    """Listens between two calls of a loop's, on the thread that makes them.

    Attributes:
        any: A number was asked for since the last `listen`.
    """

    def __init__(self) -> None:
        self.any = False
        self._mode = _Listening(self)

    def listen(self) -> None:
        """Functions are told from now on, and none was before."""
        self.any = False
        take_away(self._mode)
        put_outermost(self._mode)

    def rest(self) -> None:
        """Functions are told no more."""
        take_away(self._mode)


class _Listening(TorchFunctionMode):
    def __init__(self, reads: NumberReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            self._reads.any = True
        return func(*args, **(kwargs or {}))


# What copies, pickles and scripts of a model are without: the hooks that a watch has put on it.


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The dicts in which a module has its forward hooks, each by the number of its handle."""


class UncopiedHooks:
    """Forward hooks that stay on the module they were put on: `copy`, `pickle` and `torch.save` do not see them.

    A loop copies its best model and saves whole ones, and would take the hooks along, and with them the watch. Copying
    and pickling look in `copyreg.dispatch_table` before they ask the object itself; while hooks are there, the classes
    of their modules have an entry in it. A class with a `__deepcopy__` of its own is not looked up there.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._keys: set[int] = set()
        self._entries: dict[type, tuple[Any, Any]] = {}
        _LIVING.add(self)

    def add(self, module: nn.Module, *handles: Any) -> None:
        """These are the handles of forward hooks that were put on a module."""
        self._handles += handles
        self._keys.update(handle.id for handle in handles)
        kind = type(module)
        if kind not in self._entries:
            before = copyreg.dispatch_table.get(kind)
            self._entries[kind] = before, self._reducer(before)
            copyreg.dispatch_table[kind] = self._entries[kind][1]

    def remove(self) -> None:
        """No hook is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._keys.clear()
        for kind, (before, ours) in self._entries.items():
            if copyreg.dispatch_table.get(kind) is not ours:  # somebody else's is around it
                continue
            if before is None:
                del copyreg.dispatch_table[kind]
            else:
                copyreg.dispatch_table[kind] = before
        self._entries.clear()

    def _reducer(self, before: Callable[[Any], Any] | None) -> Callable[[nn.Module], Any]:
        def reduced(module: nn.Module) -> Any:
            # Protocols from 2 on take an object apart alike.
            made = module.__reduce_ex__(2) if before is None else before(module)
            if not isinstance(made, tuple) or len(made) < 3:
                return made
            state = made[2]
            if isinstance(state, tuple) and len(state) == 2:  # of a class with slots
                return *made[:2], (_without_hooks(state[0], self._keys), state[1]), *made[3:]
            return *made[:2], _without_hooks(state, self._keys), *made[3:]

        return reduced

    @staticmethod
    @contextmanager
    def left_out_of_scripts() -> Iterator[None]:
        """Inside, `torch.jit.script` compiles a module without the hooks that are here: it cannot compile them."""

        def scripted(module: Any, run: Callable[[], Any]) -> Any:
            keys = set[int]().union(*(one._keys for one in list(_LIVING)))  # noqa: SLF001 - of this class
            parts = list(nn.Module.modules(module)) if isinstance(module, nn.Module) else []
            before = [(vars(part), {name: vars(part)[name] for name in _HOOKS if name in vars(part)}) for part in parts]
            try:
                for held, _ in before:
                    held.update(_without_hooks(held, keys))
                return run()
            finally:
                for held, hooks in before:
                    held.update(hooks)

        with seen_scripting(scripted):
            yield


_LIVING: weakref.WeakSet[UncopiedHooks] = weakref.WeakSet()


def _without_hooks(state: Any, keys: set[int]) -> Any:
    """A module's state, changed only where it has hooks of these numbers: their dicts are copies without them."""
    if not isinstance(state, dict):
        return state
    others = {}
    for name in _HOOKS:
        hooks = state.get(name)
        if isinstance(hooks, dict) and not keys.isdisjoint(hooks):
            others[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in keys)
    return {**state, **others} if others else state


# The methods of torch's GradScaler and of its subclasses, those included that do not call on: FSDP's, a user's.


Wraps = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Given a function of a class, which takes the scaler first, and its name; returns what stands in its place."""


@contextmanager
def wrapped_in_each_class(methods: Iterable[str], wraps: Wraps) -> Iterator[None]:
    """Inside, these methods are wrapped in GradScaler and in each subclass that has its own.

    A class that is made later is seen when the first of its scalers is made. A method that calls its class's before it
    runs both wrappers.

    Args:
        methods: Their names.
        wraps: Makes the wrapper of one.
    """
    names, base = tuple(methods), torch.amp.GradScaler
    seen: set[type] = set()
    making: Any = base.__init__
    with ExitStack() as stack:
        watching = [True]
        stack.callback(watching.clear)

        def wrap(kind: type) -> None:
            for owner in kind.__mro__:
                if owner in seen or not issubclass(owner, base):
                    continue
                seen.add(owner)
                for name in names:
                    if owner is base or name in vars(owner):
                        stack.enter_context(replaced(owner, name, wraps(getattr(owner, name), name)))

        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if watching:
                wrap(type(scaler))
            making(scaler, *args, **kwargs)

        init.__wrapped__ = making  # type: ignore[attr-defined]  # functions take attributes
        stack.enter_context(replaced(base, "__init__", init))
        for kind in (base, *_below(base)):
            wrap(kind)
        yield


def _below(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


# The calls of torch's GradScaler, told as they are made, without looking at a value.
#
# `scaler_events` asks each scaler for its scale, which waits for a GPU; a loop that only is watched must not.


_METHODS = ("scale", "unscale_", "step", "update", "get_scale", "state_dict")


class ScalerListener(Protocol):
    """Told of the calls on enabled scalers."""

    def scaler_called(self, scaler: Any, method: str, argument: Any, run: Callable[[], Any]) -> Any:
        """Make the call by `run()` and return what it returned.

        Args:
            scaler: The scaler.
            method: "scale", "unscale_", "step", "update", "get_scale" or "state_dict".
            argument: The first argument: what is scaled, the optimizer, the new scale or None.
            run: Makes the call.
        """


@contextmanager
def told_of_scalers(listener: ScalerListener, *others: Any) -> Iterator[None]:
    """Inside, each call on an enabled `torch.amp.GradScaler`, or on one of a subclass, is told once.

    Args:
        listener: Told of the calls.
        others: Scalers of other classes that have its methods; torch's own may be among them.
    """
    running: list[tuple[int, int, str]] = []
    told: ScalerListener | None = listener

    def wrapped(original: Callable[..., Any], method: str) -> Callable[..., Any]:
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            key = (threading.get_ident(), id(scaler), method)
            hears = told
            if hears is None or key in running or not _is_enabled(scaler):
                return original(scaler, *args, **kwargs)
            argument = args[0] if args else next(iter(kwargs.values()), None)
            running.append(key)
            try:
                return hears.scaler_called(scaler, method, argument, lambda: original(scaler, *args, **kwargs))
            finally:
                running.remove(key)

        call.__wrapped__ = original  # type: ignore[attr-defined]  # functions take attributes
        return call

    with ExitStack() as stack:
        stack.enter_context(wrapped_in_each_class(_METHODS, wrapped))
        for scaler in others:
            if not isinstance(scaler, torch.amp.GradScaler):
                for method in filter(partial(hasattr, scaler), _METHODS):
                    call = wrapped(_unbound(getattr(scaler, method)), method)
                    try:
                        stack.enter_context(replaced(scaler, method, MethodType(call, scaler)))
                    except AttributeError:  # it has slots, and its class is told of
                        original = getattr(type(scaler), method)
                        stack.enter_context(replaced(type(scaler), method, wrapped(original, method)))
        try:
            yield
        finally:
            told = None


def _unbound(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(_scaler: Any, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def _is_enabled(scaler: Any) -> bool:
    asked = getattr(scaler, "is_enabled", None)
    return asked is None or bool(asked())


# Hears the norm that `clip_grad_norm_` computes anyway, however a program has imported that.


_NORM, _CLIP = "_get_total_norm", "_clip_grads_with_norm_"
"""What `clip_grad_norm_` asks for in its own module (torch 2.6 and later; without them no clipping is heard)."""
_DOORS = ((clip_grad, _NORM, _CLIP), (utils, "get_total_norm", "clip_grads_with_norm_"))
"""Where they hang. The second pair is public; a program that imported those by name before the watch is not heard."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """A clipping by norm that is about to be made.

    Attributes:
        total: The norm before, 0-dim, on its device; may be a DTensor.
        gradients: `id` of each gradient that is clipped.
        max_norm: What the norm is cut to.
        norm_type: 2.0 for L2; None where the program computed the norm by itself.
    """

    total: torch.Tensor
    gradients: frozenset[int]
    max_norm: float
    norm_type: float | None


Hears = Callable[[Clip], None]
"""Told of each clipping before it is made; must not raise."""


@contextmanager
def hearing(hears: Hears) -> Iterator[bool]:
    """Clippings are heard inside, and nothing of this is left in torch afterwards.

    Gives whether this torch lets them be heard. Nothing is computed, and nothing waits for a device.
    """
    if not all(hasattr(clip_grad, name) for name in (_NORM, _CLIP)):
        yield False
        return
    ear = _Ear(hears)
    put: list[tuple[ModuleType, str, Any, Any]] = []
    for module, norm, clip in _DOORS:
        for name, wrap in ((norm, ear.norm), (clip, ear.clip)):
            original = getattr(module, name, None)
            if original is not None:
                put.append((module, name, original, wrap(original)))
    for module, name, _, wrapped in put:
        setattr(module, name, wrapped)
    try:
        yield True
    finally:
        ear.close()  # whoever has wrapped the wrapper keeps it
        for module, name, original, wrapped in put:
            if getattr(module, name) is wrapped:
                setattr(module, name, original)


class _Ear:
    def __init__(self, hears: Hears) -> None:
        self.hears: Hears | None = hears
        self._last: tuple[Any, float] | None = None  # the norm computed last, and its type

    def close(self) -> None:
        self.hears = self._last = None

    def norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            found = original(tensors, norm_type, *args, **kwargs)
            if self.hears is not None and not torch.compiler.is_compiling():
                self._last = found, float(norm_type)
            return found

        return get_total_norm

    def clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grads_with_norm(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if self.hears is None or torch.compiler.is_compiling():
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # a generator can be asked only once
            self._tell([parameters] if isinstance(parameters, torch.Tensor) else parameters, max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grads_with_norm

    def _tell(self, parameters: list[torch.Tensor], max_norm: Any, total: Any) -> None:
        hears = self.hears
        norm_type = self._last[1] if self._last is not None and self._last[0] is total else None
        self._last = None
        gradients = frozenset(id(p.grad) for p in parameters if p.grad is not None)
        on_device = isinstance(max_norm, torch.Tensor) and max_norm.device.type != "cpu"
        if hears is not None and gradients and isinstance(total, torch.Tensor) and not on_device:
            hears(Clip(total=total, gradients=gradients, max_norm=float(max_norm), norm_type=norm_type))
