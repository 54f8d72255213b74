"""Protocols for traced runs and their probes, exceptions, marked loops, and calls after an import. No torch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.machinery import ModuleSpec
from time import perf_counter  # bound here, because a script may patch it
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ampdoctor.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ampdoctor.hooks.scaler_events import StepEvents


# -- traced runs --


class ObservedRun(Protocol):
    """A run whose steps are traced: a `Session`."""

    @property
    def model(self) -> nn.Module:
        """The model with the run's parameters, buffers and modules."""

    @property
    def module_names(self) -> Mapping[str, str]:
        """Maps names of `model.named_modules()` to the names to show."""

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name."""

    @property
    def events(self) -> StepEvents:
        """Shows which part of the step is running."""

    @property
    def micro_batch(self) -> int:
        """The micro-batch's index inside an accumulated step."""

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of weights that the run's own code keeps outside the model: averages, teachers."""

    def parameter_names(self) -> dict[int, str]:
        """Returns names by `id(parameter)`; "NAME.group0.param0" for one that only the optimizer NAME has."""

    def clean_name(self, name: str) -> str:
        """Returns the name to show for a parameter or buffer."""

    def current_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (path, tensor) of the running step's batches."""


# -- probes: the replay does not depend on what they look for --


class Probe(Protocol):
    """Observes a replay."""

    def attach(self, run: ObservedRun) -> AbstractContextManager[None]:
        """Installs hooks for the time of this context; they are removed afterwards, also after an exception."""

    def during(self, step: int) -> AbstractContextManager[None]:
        """Surrounds one step; modes that must see every op are entered here."""

    def finish(self, step: int, loss: Any) -> None:
        """Ends a step, where a host sync belongs; `loss` is what it returned, or the `UserCodeError` that ended it."""


class StepHalted(BaseException):
    """Raised by a probe to end the running step early; no `Exception`, so that a user's code does not catch it."""


# -- exceptions of training code --

_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_MAX_MESSAGE = 300
"""Most characters of an exception's text in one sentence; the traceback has the rest."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch's CPU allocator raises a plain RuntimeError, which only its text identifies."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def describe(error: BaseException) -> str:
    """Returns type and message of an exception in one line: "ValueError: no such file"."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 a user's broken __str__ must not hide the error that it belongs to
        lines = []
    message = lines[0].strip() if lines else ""
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 3] + "..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, its causes and the exceptions that were being handled, once each."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def code_of(error: BaseException | None) -> int:
    """Returns the exit code of a Python process that ends with this exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error is not None)


Method = TypeVar("Method", bound=Callable[..., Any])


class OwnTime:
    """The seconds that a loop has waited for methods of ours, by the clock of the outermost of these calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.apart = 0.0  # for what a sick step was looked at, which is not in `seconds`
        self.runs = False  # such a method is running; of several threads at once, the first is timed

    @contextmanager
    def set_apart(self) -> Iterator[None]:
        """Counts the time inside as `apart`."""
        before, began = self.apart, perf_counter()
        try:
            yield
        finally:
            taken = perf_counter() - began - (self.apart - before)  # what was set apart inside counts once
            self.apart += taken
            self.seconds -= taken


OWN_TIME = OwnTime()


def harmless_until(stopped: str, failed: str) -> Callable[[Method], Method]:
    """Returns a decorator of methods that raise nothing into a loop, are timed, and do nothing once `stopped`.

    Both are names: of an attribute that is true once the object has stopped, and of the method that gets an error.
    """

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, stopped):
                return None
            own, outermost = OWN_TIME, not OWN_TIME.runs
            if outermost:
                own.runs, began = True, perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a watched training is never harmed
                getattr(self, failed)(error)
                return None
            finally:
                if outermost:
                    own.runs = False
                    own.seconds += perf_counter() - began

        return cast("Method", guarded)

    return decorated


# -- marked loops --

_Told = Callable[[FrameType], None]
_listening: list[_Told] = []


def steps(iterable: Iterable[Any] | None = None) -> Iterable[Any]:
    """Mark the loop `for batch in ampdoctor.steps(loader):` as the one whose body is a training step.

    Where ampdoctor runs the script, it replays that loop. In a training of your own, this only returns the iterable.

    Args:
        iterable: What the loop iterates over; None for an endless loop over 0, 1, 2 ...

    Returns:
        The iterable itself.
    """
    for told in _listening:
        told(sys._getframe(1))  # noqa: SLF001 the caller's line identifies the loop
    return itertools.count() if iterable is None else iterable


@contextmanager
def on_marked_loop(tell: _Told) -> Iterator[None]:
    """Calls `tell` with the frame of each mark that is reached inside."""
    _listening.append(tell)
    try:
        yield
    finally:
        _listening.remove(tell)


# -- calls right after an import of the program's own --


@contextmanager
def when_imported(
    name: str, then: Callable[[], None], failed: Callable[[Exception], None] | None = None
) -> Iterator[None]:
    """Calls `then` once inside, as soon as the module `name` is imported, or at once; its error goes to `failed`."""

    def begin() -> None:
        try:
            then()
        except Exception as error:
            if failed is None:
                raise
            with suppress(Exception):  # a watch that cannot begin must not fail the script
                failed(error)

    if name in sys.modules:
        begin()
        yield
        return
    waiting = _Finder(name, begin)
    sys.meta_path.insert(0, waiting)
    try:
        yield
    finally:
        waiting.leave()
        waiting.over = True  # a module that was found inside may be executed later


class _Finder:
    """Finds nothing itself; wraps the module's own loader."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._asking = False
        self.over = False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]  # has a loader's methods
        return spec

    def executed(self) -> None:
        self.leave()
        if not self.over:
            self._then()

    def leave(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader:
    """The module's own loader, with a call after the module was executed; the module itself gets the original."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.executed()
