"""The outermost models of a loop, found by global hooks; how their modules were made; the threads that train."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampdoctor.hooks.callbacks import UncopiedHooks
from ampdoctor.hooks.json_values import NotSerializableError, class_name, written
from ampdoctor.hooks.names import wrapped_as
from ampdoctor.hooks.process_state import unwarned_of_hooks
from ampdoctor.hooks.torch_internals import forget_hook, in_backward, replaced, transforms, under_fake_tensors
from ampdoctor.probes.user_code import user_frames


class OutermostModels:
    """Finds the modules that a loop itself calls, by global hooks until all are known; tells a `StepRecorder`."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._known: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._hooks = UncopiedHooks()
        self._global: list[Any] = []
        self._inside = _Inside()
        self._redirected: dict[int, weakref.ref[nn.Module]] = {}  # modules whose wrapper has called a replaced forward
        self.unseen: list[str] = []  # what cannot be watched, in sentences
        self.searching = False  # every module's calls are observed
        self.always = False  # they are, also once an optimizer has stepped whose models are known

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Reports calls inside, and removes all hooks afterwards."""
        self.search()
        try:
            with self._hooks.left_out_of_scripts(), unwarned_of_hooks():
                yield
        finally:
            self.settle()
            self._hooks.remove()

    @property
    def roots(self) -> list[tuple[str, nn.Module]]:
        """The models that still live, each with its name in the loop; submodules of another model are not listed."""
        return [(name, module) for name, root in self._roots if (module := root()) is not None]

    def meet(self, module: nn.Module) -> None:
        """Registers a module that the loop trains, before the loop calls it."""
        if id(module) not in self._known:
            self._meet(module)

    def search_for(self, trained: Iterable[torch.Tensor]) -> bool:
        """Searches for the models of trained parameters unless all are known, and notes why no call of one was seen."""
        missed = {id(parameter) for parameter in trained}
        if missed <= {id(p) for _, root in self.roots for p in root.parameters()}:
            return False
        for frame in user_frames():
            for value in (*frame.f_locals.values(), *frame.f_globals.values()):
                if isinstance(value, nn.Module) and any(id(p) in missed for p in value.parameters()):
                    for part in value.modules():
                        self._note_compiled(part)
        self.search()  # they were not seen yet: the next step calls them
        return True

    def search(self) -> None:
        """Observes every module's calls."""
        self.searching = True
        if not self._global:
            self._global = [
                register_module_forward_pre_hook(self._enter_found),
                register_module_forward_hook(self._leave_found, with_kwargs=True, always_call=True),
            ]

    def settle(self) -> None:
        """Observes the calls of the known models alone."""
        self.searching = False
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._global:
            hook.remove()
            forget_hook(hook)
        self._global.clear()

    def left_behind(self) -> None:
        """Clears the running calls of this thread: hooks do not run for a call that an interrupt has ended."""
        self._inside.modules.clear()

    def __deepcopy__(self, _memo: dict[int, Any]) -> OutermostModels:
        """Returns itself: a copied module may have copied its hooks too (`UncopiedHooks`), and is not known here."""
        return self

    def __reduce__(self) -> tuple[type[_Nobody], tuple[()]]:
        """Pickles as `_Nobody`: a pickled module may contain its hooks, and is loaded where nothing watches."""
        return _Nobody, ()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module) -> None:
        inside = self._inside
        if inside.modules:
            inside.modules.append(module)
            return
        if not torch.is_grad_enabled() or in_backward() or under_fake_tensors() or transforms():
            return
        try:
            met = id(module) in self._known or next(module.parameters(), None) is not None
            if not met or self._is_redirected(module):
                return
            self.meet(module)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self._listener.fail(error)
            return
        inside.modules.append(module)
        self._unhook()
        self._listener.entered(module)

    def _enter_found(self, module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():  # otherwise it becomes part of the graph
            self._inside.told = module if id(module) in self._known else None
            self._enter(module)

    def _leave_found(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Ends a call; after an error torch gives a global hook no keywords: a known module's own hook ends it then."""
        if not torch.compiler.is_compiling() and (kwargs is not None or id(module) not in self._known):
            self._leave(module, args, kwargs, output)

    def _is_redirected(self, module: nn.Module) -> bool:
        """Whether a wrapper runs another part of the loop instead of the forward, as Lightning lets DDP do."""
        wrapped = _wrapped_in(module)
        forward = None if wrapped is None else vars(wrapped).get("forward")
        if wrapped is None or not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
            return False  # its own forward, or one that wraps it (`torch.autocast(...)(model.forward)`)
        key = id(wrapped)
        if wrapped is not module:
            self._redirected[key] = weakref.ref(wrapped, lambda _: self._redirected.pop(key, None))
        return key in self._redirected

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        modules = self._inside.modules
        if not any(one is module for one in modules):  # a call that was not recorded on entry
            return
        while modules and modules.pop() is not module:  # calls that an exception ended
            pass
        if not modules:
            if self.searching:
                self.search()
            self._listener.left(module, args, kwargs, output)

    def _enter_known(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if (
            torch.compiler.is_compiling() or id(module) not in self._known
        ):  # a copy of the module, with a copy of the hook
            return
        told, self._inside.told = self._inside.told, None
        if told is not module:
            self._enter(module)

    def _leave_known(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._leave(module, args, kwargs, output)

    def _meet(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{type(module).__name__} is compiled by torch.jit, and takes no hooks")
        key = id(module)
        self._known[key] = weakref.ref(module, lambda _: self._known.pop(key, None))
        self._note_compiled(module)
        name, root = _root_of(module)
        if not any(known is root for _, known in self.roots):
            inside = {id(part) for part in root.modules()}
            self._roots = [(n, r) for n, r in self._roots if (m := r()) is not None and id(m) not in inside]
            self._roots.append((name, weakref.ref(root)))
        self._hooks.add(
            module,
            module.register_forward_pre_hook(self._enter_known, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._leave_known, with_kwargs=True, always_call=True),
        )

    def _note_compiled(self, module: nn.Module) -> None:
        sentence = (
            f"{type(module).__name__}.compile() has compiled the module's call, and no hook is called any more: its "
            f"calls are not recorded (torch.compile(model) leaves hooks outside)"
        )
        if getattr(module, "_compiled_call_impl", None) is not None and sentence not in self.unseen:
            self.unseen.append(sentence)


class _Nobody:
    """Replaces `OutermostModels` in the pickled hooks of a module."""

    def _enter_known(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        pass

    def _leave_known(self, _module: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        pass


class _Inside(threading.local):
    """The modules whose calls are running on this thread, the outermost first."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.told: nn.Module | None = None  # a global hook has entered it, and its own hook comes next


def _wrapped_in(module: nn.Module) -> nn.Module | None:
    """Returns the innermost module, itself without wrappers; None where a wrapper replaces parameters."""
    while (held := wrapped_as(module)) is not None:
        if held == "_fsdp_wrapped_module" or getattr(module, "mixed_precision", None) is not None:
            return None
        module = getattr(module, held)
    return module


def _root_of(module: nn.Module) -> tuple[str, nn.Module]:
    """Returns the outermost module in the loop's variables that contains this one, after its name in the loop."""
    best, name = module, ""
    for frame in user_frames():
        for variable, value in (*frame.f_locals.items(), *frame.f_globals.items()):
            if value is best:
                name = name or variable
            elif isinstance(value, nn.Module) and any(part is best for part in value.modules()):
                best, name = value, variable if variable != "self" else ""
    return name or type(best).__name__, best


# -- constructor arguments of the user's modules --

_LARGEST = 10_000
"""Modules recorded at most: more are not parts of one model."""


class Constructions:
    """Records how modules are made; arguments are serialized at once, before the constructor can change them."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[nn.Module, Mapping[str, Any]] = weakref.WeakKeyDictionary()
        self._codes: weakref.WeakKeyDictionary[type, frozenset[CodeType]] = weakref.WeakKeyDictionary()

    def of(self, module: nn.Module) -> Mapping[str, Any] | None:
        """Returns a module's class and file, and its `args` and `kwargs` as trees, or `why` not; None if unseen."""
        try:
            return self._made.get(module)
        except TypeError:  # a module that cannot be hashed
            return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records modules of classes that are not torch's, and removes the patch afterwards."""
        original: Any = nn.Module.__init__
        note: Callable[[nn.Module, FrameType], None] | None = self._note

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if note is not None and not type(module).__module__.startswith("torch."):
                with suppress(Exception):  # a training is never harmed
                    note(module, sys._getframe(1))  # noqa: SLF001 - the constructor that calls this one

        try:
            with replaced(nn.Module, "__init__", init):
                yield
        finally:
            note = None  # code that has saved our `__init__` may still call it

    def _note(self, module: nn.Module, frame: FrameType | None) -> None:
        cls = type(module)
        if module in self._made or len(self._made) > _LARGEST:
            return
        outermost = self._outermost(cls, module, frame)
        parts: dict[str, Any]
        entry = {"class": class_name(cls), "file": _file_of(cls)}
        if outermost is None:  # it has no __init__ of its own, and so no arguments
            self._made[module] = {**entry, "args": [], "kwargs": {}}
            return
        args, kwargs = _arguments(outermost)
        try:
            parts = {
                "args": [written(one, self._part) for one in args],
                "kwargs": {name: written(one, self._part) for name, one in kwargs.items()},
            }
        except NotSerializableError as error:
            parts = {"why": str(error)}
        self._made[module] = {**entry, **parts}

    def _part(self, value: Any) -> Any:
        """Serializes a module that was recorded itself by its own constructor arguments."""
        if not isinstance(value, nn.Module):
            return None
        made = self.of(value)
        return None if made is None or "why" in made else {"kind": "made", "made": dict(made)}

    def _outermost(self, cls: type, module: nn.Module, frame: FrameType | None) -> FrameType | None:
        """The frame of the `__init__` of the module's own class: the outermost of the frames that make it."""
        codes = self._codes.get(cls)
        if codes is None:
            inits = (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
            codes = frozenset(code for init in inits if (code := getattr(inspect.unwrap(init), "__code__", None)))
            self._codes[cls] = codes
        found = None
        for _ in range(40):
            if frame is None:
                break
            code = frame.f_code
            if code in codes and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
                found = frame
            frame = frame.f_back
        return found


def _arguments(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a constructor's arguments without `self`, from its frame, before its body has run."""
    code, here = frame.f_code, frame.f_locals
    names = code.co_varnames
    positional, keywords = code.co_argcount, code.co_kwonlyargcount
    only = code.co_posonlyargcount
    args = [here[name] for name in names[1:only]]
    kwargs = {name: here[name] for name in names[max(only, 1) : positional + keywords] if name in here}
    at = positional + keywords
    if code.co_flags & inspect.CO_VARARGS:
        more = here[names[at]]
        if more:  # the parameters before them can then only be passed by position
            args = [here[name] for name in names[1:positional]]
            kwargs = {name: here[name] for name in names[positional : positional + keywords]}
        args += more
        at += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs.update(here[names[at]])
    return tuple(args), kwargs


def _file_of(cls: type) -> str | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file if isinstance(file, str) else None


# -- threads --

SEVERAL = "several threads train at once"
"""Why nothing is run again: threads share the model, the random numbers and torch's state."""


class Trainers:
    """Tracks the threads that train: a step begins with a backward or a call in training mode, an update ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = 0
        self._began: dict[threading.Thread, int] = {}
        self._trained: dict[threading.Thread, int] = {}
        self._recorded: threading.Thread | None = None
        self.several = False

    def called(self) -> None:
        """Called when this thread calls a model, with whose output it may train."""
        with self._lock:
            self._begin(threading.current_thread())

    def trains(self) -> None:
        """Called when this thread runs a backward, or is about to make an update."""
        here = threading.current_thread()
        with self._lock:
            began = self._begin(here)
            self._trained[here] = self._clock
            others = [thread for thread, when in self._trained.items() if thread is not here and when > began]
            self.several |= any(thread.is_alive() for thread in others)

    def updated(self) -> None:
        """Called when this thread has ended a step; forgets threads that ended, and calls of those that never train."""
        with self._lock:
            began = self._began.pop(threading.current_thread(), 0)
            for thread, when in list(self._began.items()):
                if not thread.is_alive() or (when < began and thread not in self._trained):
                    del self._began[thread]
            for thread in [thread for thread in self._trained if not thread.is_alive()]:
                del self._trained[thread]

    def crowded(self) -> bool:
        """Whether another thread is in the middle of a step, or may soon be."""
        here = threading.current_thread()
        with self._lock:
            return self.several or any(thread is not here and thread.is_alive() for thread in self._began)

    def is_recorded(self) -> bool:
        """Whether this thread is recorded: the first that calls a model, until it ends or another one trains."""
        here = threading.current_thread()
        if self._recorded is here:
            return True
        with self._lock:
            there = self._recorded
            if there is None or not there.is_alive() or (here in self._trained and there not in self._began):
                self._recorded = here
            return self._recorded is here

    def _begin(self, here: threading.Thread) -> int:
        self._clock += 1
        return self._began.setdefault(here, self._clock)
