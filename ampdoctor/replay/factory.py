"""The factory that the user names on the command line; each call returns a fresh `TrainingRun`."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.adapters import Adapter, adapter_of
from ampdoctor.replay.training_run import TrainingRun, kind_of
from ampdoctor.replay.user_code import forget_working_folder, shown_once, user_code
from ampdoctor.replay.user_files import forbid_training_and_writes
from ampdoctor.replay.user_modules import Spec, load_object, makes_run

Environment = Callable[[], AbstractContextManager[Any]]
"""Makes the context manager around user code (a CUDA emulation); entered many times."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedFactory:
    """An imported factory, which can be called repeatedly for fresh runs."""

    instead: ClassVar[str] = "leave that out of what the factory returns, or replay in a copy of the folder"

    name: str  # as the user wrote it, or the function's own name; for reports and errors
    function: Callable[..., Any]
    argv0: str | None = None  # `sys.argv[0]` while user code runs; None if the callable itself was passed
    script_arguments: tuple[str, ...] = ()  # the rest of `sys.argv`
    path: tuple[str, ...] = ()  # folders that are first on `sys.path` while user code runs
    app_dir: str | None = None
    environment: Environment = contextlib.nullcontext
    shown: set[object] = field(default_factory=set)  # parts of the run whose output was shown

    @contextlib.contextmanager
    def user_code(self, what: str) -> Iterator[None]:
        """Run the user's code in its environment, with its argv and import path; its output goes to stderr."""
        entered = user_code(self.argv0, what=what, path=self.path, arguments=self.script_arguments)
        with self.environment(), entered:
            yield

    def make(
        self,
        arguments: Mapping[str, Any] | None = None,
        *,
        batches: str | Any | None = None,
        loss: str | Callable[..., Any] | None = None,
    ) -> TrainingRun:
        """Call the factory with keyword `arguments` for a fresh run."""
        arguments = dict(arguments or {})
        check_arguments(self.function, arguments, self.name)
        what = f"the factory {self.name!r}"
        meant = self.argv0 is None or makes_run(self.function)  # a callable, or a function written for this
        forbidden = forbid_training_and_writes(what, (Path.cwd(), *self.path), may_step=meant)
        with self.user_code(what), forbidden, shown_once(self.shown, "factory"):
            made = self.function(**arguments)
        with self.environment():
            return self._as_run(made, batches, loss)

    def _as_run(self, made: Any, batches: Any, loss: Any) -> TrainingRun:
        from torch import nn

        given = {"--batches": batches, "--loss": loss}
        adapter = adapter_of(made)
        if adapter is not None or isinstance(made, TrainingRun):
            run = made if adapter is None else self._started(adapter, made)
            open_loss = adapter is not None and run.loss is not None  # a framework's loop around the user's own loss
            extra = [option for option, value in given.items() if value is not None]
            if extra and not (open_loss and extra == ["--loss"]):
                kind = "a TrainingRun" if adapter is None else f"what {adapter.name} makes"
                raise FactoryError(
                    f"the factory {self.name!r} returns {kind}, which has its own batches and loss: "
                    f"leave out {' and '.join(extra)}"
                )
            return run if loss is None else replace(run, loss=self._part(loss, "--loss"))
        if not isinstance(made, nn.Module):
            raise FactoryError(f"the factory {self.name!r} {_wrong_return(made)}")
        absent = [option for option, value in given.items() if value is None]
        if absent:
            raise FactoryError(
                f"the factory {self.name!r} returns a bare model: say the rest with {' and '.join(absent)}, "
                f"or return a TrainingRun"
            )
        return TrainingRun(model=made, batches=self._part(batches, "--batches"), loss=self._part(loss, "--loss"))

    def _started(self, adapter: Adapter, made: Any) -> TrainingRun:
        what = f"the start of {adapter.name}'s training"
        with self.user_code(what), forbid_training_and_writes(what, (Path.cwd(), *self.path), may_step=True):
            return adapter.run_of(made)

    def _part(self, part: Any, option: str) -> Any:
        if not isinstance(part, str):
            return part
        spec = Spec.parse(part)
        return load_object(spec, path=spec.search_path(self.app_dir), what=option, reuse=True)


def load_factory(
    factory: str | Callable[..., Any],
    app_dir: str | None = None,
    *,
    environment: Environment | None = None,
    script_arguments: Sequence[str] = (),
    shown: set[object] | None = None,
) -> LoadedFactory:
    """Import a factory without calling it."""
    around = environment or contextlib.nullcontext
    shown = set() if shown is None else shown
    forget_working_folder()
    if not isinstance(factory, str):
        name = getattr(factory, "__qualname__", None) or type(factory).__qualname__
        _check_callable(factory, name)
        return LoadedFactory(name=name, function=factory, app_dir=app_dir, environment=around, shown=shown)
    spec = Spec.parse(factory)
    path = spec.search_path(app_dir)
    with around():
        function = load_object(spec, path=path, arguments=script_arguments)
        _check_callable(function, factory)
    argv0 = getattr(sys.modules.get(spec.module), "__file__", None) or spec.argv0
    return LoadedFactory(
        name=factory,
        function=function,
        argv0=argv0,
        script_arguments=tuple(script_arguments),
        path=path,
        app_dir=app_dir,
        environment=around,
        shown=shown,
    )


def _check_callable(value: object, name: str) -> None:
    from torch import nn

    if isinstance(value, TrainingRun | nn.Module):
        kind = "TrainingRun" if isinstance(value, TrainingRun) else "model"
        raise FactoryError(f"{name!r} is a {kind} that was made once: a replay needs a function that makes a fresh one")
    if not callable(value):
        raise FactoryError(f"{name!r} is not a function but {kind_of(value)}")


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
    """Raises FactoryError if arguments do not fit the signature: a TypeError of the call is then the user's own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: the call itself raises
        return
    known = [p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    unknown = next((argument for argument in arguments if argument not in known), None)
    if unknown is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        near = difflib.get_close_matches(unknown, known, n=3)
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise FactoryError(f"the factory {name!r} has no argument {unknown!r}: {hint}{takes}")
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    missing = [parameter for parameter in missing if parameter not in arguments]
    if missing:
        form = " ".join(f"--arg {parameter}=JSON" for parameter in missing)
        raise FactoryError(f"the factory {name!r} needs {', '.join(missing)}: give {form}")


def _wrong_return(made: Any) -> str:
    from torch import nn

    if made is None:
        return "returned nothing: did you forget `return`?"
    values = made.values() if isinstance(made, Mapping) else made if isinstance(made, tuple | list) else ()
    if any(isinstance(value, nn.Module) for value in values):
        kind = type(made).__name__
        return f"returned a {kind} of parts: name them, as in TrainingRun(model=..., batches=..., loss=...)"
    return (
        f"returned {kind_of(made)}: it must return a TrainingRun, a model, or what a framework makes (a Trainer, "
        f"(LightningModule, Trainer), (Accelerator, and what its prepare gave))"
    )
