"""Changes to try on a replay (formats, optimizer, loss scale): each is a context around its steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec

import torch

from ampdoctor.errors import ReplayError
from ampdoctor.hooks.backwards import Backwards
from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.precision.fp32_modules import force_fp32
from ampdoctor.probes.modules import optimizer_parameters
from ampdoctor.replay.session import Session

Change = Callable[[Session], AbstractContextManager[Any]]
P = ParamSpec("P")


def _change(during: Callable[Concatenate[Session, P], Iterator[None]]) -> Callable[P, Change]:
    """Makes a function that returns a change, of a generator that takes the session before its arguments."""
    context = contextmanager(during)

    @functools.wraps(during)
    def made(*args: P.args, **keywords: P.kwargs) -> Change:
        return lambda session: context(session, *args, **keywords)

    return made


@_change
def fp32_modules(session: Session, names: Sequence[str]) -> Iterator[None]:
    """Returns a change: the named modules in fp32."""
    real = {clean: name for name, clean in session.module_names.items()}
    modules = dict(session.model.named_modules())
    for name in names:
        if isinstance(modules.get(real.get(name, name)), torch.jit.ScriptModule):
            raise ReplayError(f"{name} is a scripted module, whose precision cannot be changed from outside")
    with force_fp32(session.model, [real.get(name, name) for name in names], session.optimizers.values()):
        yield


def compute_dtype(compute: str) -> Change:
    """Returns a change: the whole run in another compute format."""
    return lambda session: session.computing_in(compute)


@_change
def loss_scale(session: Session, scale: float) -> Iterator[None]:
    """Returns a change: another loss scale at the bad step."""
    state = session.scaler.state_dict()
    if state:
        session.scaler.load_state_dict({**state, "scale": scale})
    yield


@_change
def both(session: Session, first: Change, second: Change) -> Iterator[None]:
    """Returns two changes as one, the first outside."""
    with first(session), second(session):
        yield


@_change
def with_scaler(session: Session, /, init_scale: float, **settings: Any) -> Iterator[None]:
    """Returns a change: a fresh, enabled GradScaler with these settings in place of the run's own."""
    with session.scaling_with(torch.amp.GradScaler(session.device.type, init_scale, **settings)):
        yield


@_change
def optimizer_argument(session: Session, name: str, value: float) -> Iterator[None]:
    """Returns a change: one hyper-parameter of every optimizer."""
    for optimizer in session.optimizers.values():
        for group in optimizer.param_groups:
            if name in group:
                group[name] = value
    yield


TRAINED_IN_FP32 = (
    "keep the parameters that are trained in fp32, and the frozen ones as they are: p.data = p.data.float() for those "
    "of model.parameters() that require a gradient, before the optimizer is built"
)


def trained_in_fp32(session: Session) -> AbstractContextManager[Any]:
    """Keep the optimizers' parameters and moments in fp32; frozen parameters stay half."""
    return session.keeping_master_weights()


def mostly_frozen(session: Session) -> bool:
    """Whether the optimizers hold less than half of the model's elements (adapters, a head)."""
    held = set(map(id, optimizer_parameters(session)))
    sizes = [(p.numel(), id(p) in held) for p in session.model.parameters()]
    return 0 < 2 * sum(n for n, trained in sizes if trained) < sum(n for n, _ in sizes)


@contextmanager
def fresh_casts(session: Session) -> Iterator[None]:  # noqa: ARG001 - autocast keeps its copies beside the session
    """Make autocast's copies of the weights anew at each use: cache_enabled=False, in the user's contexts too."""
    switch, before = torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()

    def off(enabled: bool) -> None:  # noqa: FBT001, ARG001 - torch's signature
        switch(False)

    torch.set_autocast_cache_enabled = off
    switch(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled = switch
        switch(before)


@contextmanager
def no_change(session: Session) -> Iterator[None]:  # noqa: ARG001 - a change that changes nothing
    """Change nothing, for a trial that leaves out a step."""
    yield


@_change
def perturbed_weights(session: Session, narrow: torch.dtype) -> Iterator[None]:
    """Returns a change: each weight moves by half a unit in a format's last place (in fp32's, by a whole one)."""
    unit = torch.finfo(narrow).eps / (1 if narrow is torch.float32 else 2)  # half of one would round away
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in session.model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
            parameter.mul_(1 + unit * signs.to(parameter.device, parameter.dtype))
    yield


# -- another loss scale for a step that scales its loss by hand: tried in the backward, as the code is the user's --


@_change
def rescaled(session: Session, factor: float) -> Iterator[None]:
    """Returns a change: the backward runs on `factor` (a power of two) times the loss, which is divided out again."""
    backwards = session.events.backwards

    def divided(grad: torch.Tensor) -> torch.Tensor | None:
        return grad / factor if backwards.inside else None

    with ExitStack() as stack:
        for parameter in session.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                stack.callback(on_gradient(parameter, divided).remove)
        stack.enter_context(_roots_scaled(factor, backwards))
        yield


@contextmanager
def noted_roots() -> Iterator[list[float]]:
    """Yields the values from which backwards start, in order: divided by the loss, they show how a step scales it."""
    noted: list[float] = []
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **keywords: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        noted.extend(float(root.detach().float().sum()) for root in roots)
        original(tensors, *args, **keywords)

    torch.autograd.backward = backward
    try:
        yield noted
    finally:
        torch.autograd.backward = original


@contextmanager
def _roots_scaled(factor: float, backwards: Backwards) -> Iterator[None]:
    """Make `loss.backward()` start with `factor` instead of 1, but not inside another (reentrant checkpointing)."""
    original = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        if backwards.inside:
            original(tensors, grad_tensors, *args, **keywords)
            return
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else grad_tensors
        starts = tuple(given) if len(tuple(given)) == len(roots) else (None,) * len(roots)
        scaled = [
            torch.full_like(root, factor) if start is None else start * factor
            for root, start in zip(roots, starts, strict=True)
        ]
        original(roots, scaled, *args, **keywords)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
