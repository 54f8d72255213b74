"""Callbacks for a loop's gradients, steps, clippings and scaler calls; and module hooks that copies do not inherit."""

from __future__ import annotations

import copyreg
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad

from ampdoctor.hooks.torch_internals import FunctionMode, put_outermost, replaced, seen_scripting, take_away

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


# -- gradients --


def on_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
    """As `Tensor.register_hook`, but without the call where the gradient is undefined: torch gives None there."""

    def told(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else hook(gradient)

    return tensor.register_hook(told)  # type: ignore[no-any-return]


# -- reads of numbers: without one, a loop's decisions cannot depend on what it has computed --

READS = frozenset(
    {
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
        *("__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"),
    }
)
"""torch's functions that return a Python number, or let NumPy read a tensor."""


class FunctionObserver:
    """Observes torch's functions between two calls of a loop, on the thread that makes them."""

    def __init__(self, called: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._mode = FunctionMode(called)
        self._listens = False

    def listen(self) -> None:
        """Starts to observe."""
        self._listens = True
        take_away(self._mode)
        put_outermost(self._mode)

    def rest(self) -> None:
        """Stops observing."""
        if self._listens:
            self._listens = False
            take_away(self._mode)


class NumberReads(FunctionObserver):
    """Observes whether the loop reads a number."""

    def __init__(self) -> None:
        super().__init__(self._called)
        self.any = False  # a number was read since the last `listen`

    def listen(self) -> None:
        """Starts to observe."""
        self.any = False
        super().listen()

    def _called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.any |= getattr(function, "__name__", "") in READS
        return function(*args, **kwargs)


# -- module hooks that copies, pickles and scripts of a model do not have --

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The dicts of a module's forward hooks, by the id of the handle."""


class UncopiedHooks:
    """Forward hooks that `copy`, `pickle` and `torch.save` leave out, by entries in `copyreg.dispatch_table`."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._keys: set[int] = set()
        self._entries: dict[type, tuple[Any, Any]] = {}
        _LIVING.add(self)

    def add(self, module: nn.Module, *handles: Any) -> None:
        """Registers the handles of forward hooks on a module."""
        while self._handles and self._handles[-1].hooks_dict_ref() is None:  # of a module that was made for one call
            self._keys.discard(self._handles.pop().id)
        self._handles += handles
        self._keys.update(handle.id for handle in handles)
        kind = type(module)
        if kind not in self._entries:
            before = copyreg.dispatch_table.get(kind)
            self._entries[kind] = before, self._reducer(before)
            copyreg.dispatch_table[kind] = self._entries[kind][1]

    def remove(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._keys.clear()
        for kind, (before, ours) in self._entries.items():
            if copyreg.dispatch_table.get(kind) is not ours:  # another program has replaced it
                continue
            if before is None:
                del copyreg.dispatch_table[kind]
            else:
                copyreg.dispatch_table[kind] = before
        self._entries.clear()

    def _reducer(self, before: Callable[[Any], Any] | None) -> Callable[[nn.Module], Any]:
        def reduced(module: nn.Module) -> Any:
            # protocols from 2 on reduce an object alike
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
        """Lets `torch.jit.script` compile a module without these hooks, which it cannot compile."""

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
    """Returns a module's state; where it has hooks with these ids, their dicts are replaced by copies without them."""
    if not isinstance(state, dict):
        return state
    others = {}
    for name in _HOOKS:
        hooks = state.get(name)
        if isinstance(hooks, dict) and not keys.isdisjoint(hooks):
            others[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in keys)
    return {**state, **others} if others else state


# -- methods of GradScaler and its subclasses, even if these do not call super(): FSDP's, a user's --

Wraps = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Gets a method as a function of the scaler, and its name; returns the replacement."""


@contextmanager
def wrapped_in_each_class(methods: Iterable[str], wraps: Wraps) -> Iterator[None]:
    """Wraps these methods in GradScaler and each subclass that overrides them, later ones at their first scaler."""
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


# -- calls of GradScaler; no scale is read, which would wait for a GPU --

_METHODS = ("scale", "unscale_", "step", "update", "get_scale", "state_dict")


ScalerCall = Callable[[Any, str, Any, Callable[[], Any]], Any]
"""Gets the scaler, the method's name, its first argument (losses, optimizer, new scale or None) and the call itself;
makes the call, and returns its result."""


@contextmanager
def on_scaler_call(
    called: ScalerCall, *others: Any, methods: Iterable[str] = _METHODS, disabled: bool = False
) -> Iterator[None]:
    """Hands each call on a GradScaler, a subclass or one of `others` to `called` once; on `disabled` ones if asked."""
    running: list[tuple[int, int, str]] = []
    told: ScalerCall | None = called

    def wrapped(original: Callable[..., Any], method: str) -> Callable[..., Any]:
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            key = (threading.get_ident(), id(scaler), method)
            now = told
            if now is None or key in running or not (disabled or is_enabled(scaler)):
                return original(scaler, *args, **kwargs)
            argument = args[0] if args else next(iter(kwargs.values()), None)
            running.append(key)
            try:
                return now(scaler, method, argument, lambda: original(scaler, *args, **kwargs))
            finally:
                running.remove(key)

        call.__wrapped__ = original  # type: ignore[attr-defined]  # functions take attributes
        return call

    with ExitStack() as stack:
        stack.enter_context(wrapped_in_each_class(methods, wrapped))
        for scaler in others:
            for method in filter(partial(hasattr, scaler), methods):
                if isinstance(scaler, torch.amp.GradScaler) and method not in vars(scaler):
                    continue
                bound = getattr(scaler, method)
                call = wrapped(lambda _, *args, bound=bound, **kwargs: bound(*args, **kwargs), method)
                stack.enter_context(replaced(scaler, method, MethodType(call, scaler)))
        try:
            yield
        finally:
            told = None


def is_enabled(scaler: Any) -> bool:
    """Returns whether a scaler scales; one without `is_enabled` does."""
    asked = getattr(scaler, "is_enabled", None)
    return asked is None or bool(asked())


# -- clippings: the norm that `clip_grad_norm_` computes anyway, however a program imports it --

_NORM, _CLIP = "_get_total_norm", "_clip_grads_with_norm_"
"""Functions that `clip_grad_norm_` calls in its own module (torch 2.6 and later; without them no clipping is seen)."""
_DOORS = ((clip_grad, _NORM, _CLIP), (utils, "get_total_norm", "clip_grads_with_norm_"))
"""Where they are replaced. The second pair is public; a program that has imported it by name before is not seen."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """A clipping by norm that is about to be made."""

    total: torch.Tensor  # the norm before, 0-dim, on its device; may be a DTensor
    gradients: frozenset[int]  # `id` of each clipped gradient
    parameters: tuple[int, ...]  # `id` of each of their parameters
    max_norm: float
    norm_type: float | None  # 2.0 for L2; None where the program computed the norm itself


OnClip = Callable[[Clip], None]
"""Called before each clipping; must not raise."""


@contextmanager
def on_clip(*listeners: OnClip) -> Iterator[bool]:
    """Calls `listeners` before each clipping, without waiting; yields whether this torch makes clippings visible."""
    if not all(hasattr(clip_grad, name) for name in (_NORM, _CLIP)):
        yield False
        return
    hook = _ClipHook(listeners)
    with ExitStack() as stack:
        stack.callback(hook.close)  # a program that has wrapped our wrapper still calls it
        for module, norm, clip in _DOORS:
            for name, wrap in ((norm, hook.norm), (clip, hook.clip)):
                original = getattr(module, name, None)
                if original is not None:
                    stack.enter_context(replaced(module, name, wrap(original)))
        yield True


class _ClipHook:
    def __init__(self, listeners: tuple[OnClip, ...]) -> None:
        self.listeners = listeners
        self._last: tuple[Any, float] | None = None  # the last computed norm, and its type

    def close(self) -> None:
        self.listeners, self._last = (), None

    def norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            found = original(tensors, norm_type, *args, **kwargs)
            if self.listeners and not torch.compiler.is_compiling():
                self._last = found, float(norm_type)
            return found

        return get_total_norm

    def clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grads_with_norm(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.listeners or torch.compiler.is_compiling():
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # a generator runs only once
            self._tell([parameters] if isinstance(parameters, torch.Tensor) else parameters, max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grads_with_norm

    def _tell(self, parameters: list[torch.Tensor], max_norm: Any, total: Any) -> None:
        norm_type = self._last[1] if self._last is not None and self._last[0] is total else None
        self._last = None
        gradients = {id(p): id(gradient) for p in parameters if (gradient := p.grad) is not None}
        on_device = isinstance(max_norm, torch.Tensor) and max_norm.device.type != "cpu"
        if gradients and isinstance(total, torch.Tensor) and not on_device:
            clip = Clip(
                total=total,
                gradients=frozenset(gradients.values()),
                parameters=tuple(gradients),
                max_norm=float(max_norm),
                norm_type=norm_type,
            )
            for listener in self.listeners:
                listener(clip)
