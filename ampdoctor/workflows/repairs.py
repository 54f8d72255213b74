"""Repairs for a replay: of wrong calls of the scaler, and of values that a checkpoint lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.checkpoints.tensor_statistics import NEVER_NEGATIVE
from ampdoctor.diagnosis.replay.nonfinite import HELP, MISUSE_ADVICE, refusal_advice
from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Prescription
from ampdoctor.evidence.report_replay import HALF_WEIGHTS, WITHOUT_GRADIENTS
from ampdoctor.hooks.backwards import mark_scaled, scaled_within
from ampdoctor.hooks.callbacks import on_gradient, on_scaler_call
from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.probes.modules import optimizer_parameters
from ampdoctor.probes.nonfinite import state_tensors
from ampdoctor.workflows.changes import both, loss_scale

if TYPE_CHECKING:
    from ampdoctor.diagnosis.replay.scaler import HalfWeights
    from ampdoctor.evidence.location import Where
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.changes import Change
    from ampdoctor.workflows.trials import Trials


# -- misuse of the scaler: changes that make the wrong order of calls in the user's step harmless --

LOWER = (0, 2, 4, 6, 8, 12, 16)
"""Powers of 2 by which the scale is lowered as well, in this order, if gradients overflowed under it."""


def unscaled_on_arrival(session: Session) -> AbstractContextManager[None]:
    """Divide gradients by the scale when they reach their parameters; unscaling then only checks for infinities."""
    return _arriving(session, divided=lambda scaler: scaler.get_scale())


def each_unscaled_on_arrival(session: Session) -> AbstractContextManager[None]:
    """Like `unscaled_on_arrival`, but with the scale of the backward's own loss: an unscaled loss has none."""
    backwards = session.events.backwards
    return _arriving(session, divided=lambda _: backwards.scale if backwards.inside else None)


def unscaled_by_the_step(session: Session) -> AbstractContextManager[None]:
    """Make unscaling only check for infinities: the step's own division is then the only one."""
    return _arriving(session, divided=None)


@contextmanager
def asked_for_unscaled(session: Session) -> Iterator[None]:
    """Unscale the gradients that the step asks for outside its backwards."""

    def scale(scaler: Any, _method: str, _outputs: Any, run: Callable[[], Any]) -> Any:
        scaled, factor = run(), scaler.get_scale()
        for output in _differentiable(scaled):
            on_gradient(output, lambda grad: None if session.events.backwards.inside else grad / factor)
        return scaled

    with on_scaler_call(scale, methods=("scale",), disabled=True):
        yield


@contextmanager
def scaled_once(session: Session) -> Iterator[None]:  # noqa: ARG001 - a change that needs no part of the run
    """Undo, in the backward, the scaling of a tensor that is scaled once more later."""

    def scale(scaler: Any, _method: str, outputs: Any, run: Callable[[], Any]) -> Any:
        for marked in scaled_within(outputs):
            marked.append(True)
        scaled, factor = run(), scaler.get_scale()

        def divided(again: list[bool], grad: torch.Tensor) -> torch.Tensor | None:
            return grad / factor if again else None  # filled by now if it was scaled once more

        for output in _differentiable(scaled):
            on_gradient(output, partial(divided, mark_scaled(output)))
        return scaled

    with on_scaler_call(scale, methods=("scale",), disabled=True):
        yield


def _differentiable(scaled: Any) -> Iterator[torch.Tensor]:
    for output in scaled if isinstance(scaled, list | tuple) else (scaled,):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            yield output


@contextmanager
def cleared(session: Session) -> Iterator[None]:
    """Remove the gradients that an earlier step left behind."""
    for parameter in session.model.parameters():
        parameter.grad = None
    yield


@contextmanager
def cleared_of_others(session: Session) -> Iterator[None]:
    """Remove gradients that were left when another optimizer stepped, before their own backward adds to them."""
    left: set[int] = set()
    parameters = [p for p in session.model.parameters() if p.requires_grad and p.is_leaf]

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        left.update(id(parameter) for parameter in parameters if id(parameter) not in own)

    def arrives(parameter: torch.Tensor, _: torch.Tensor) -> None:
        if id(parameter) in left:
            left.discard(id(parameter))
            parameter.grad = None

    with ExitStack() as stack:
        for optimizer in session.optimizers.values():
            stack.callback(optimizer.register_step_post_hook(stepped).remove)
        for parameter in parameters:
            stack.callback(on_gradient(parameter, partial(arrives, parameter)).remove)
        yield


@contextmanager
def _arriving(session: Session, *, divided: Callable[[Any], float | None] | None) -> Iterator[None]:
    scalers = [session.scaler]
    unscaling = torch.amp.GradScaler._unscale_grads_

    def scale(scaler: Any, _method: str, _outputs: Any, run: Callable[[], Any]) -> Any:
        scalers.append(scaler)  # a step may hold a scaler itself
        return run()

    def unscale(scaler: Any, optimizer: Any, inv_scale: Any, found_inf: Any, *rest: Any) -> Any:
        return unscaling(scaler, optimizer, torch.ones_like(inv_scale), found_inf, *rest)

    def arrived(grad: torch.Tensor) -> torch.Tensor | None:
        factor = divided(scalers[-1]) if divided is not None else None
        return None if factor is None else grad / factor

    def undivided(optimizer: Any, *_: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused optimizer divides by it in its own step
            optimizer.grad_scale = torch.ones_like(optimizer.grad_scale)

    with ExitStack() as stack:
        for optimizer in session.optimizers.values():
            stack.callback(optimizer.register_step_pre_hook(undivided).remove)
        for parameter in session.model.parameters() if divided is not None else ():
            if parameter.requires_grad and parameter.is_leaf:
                stack.callback(_hooked_first(parameter, arrived).remove)
        stack.enter_context(on_scaler_call(scale, methods=("scale",), disabled=True))
        stack.enter_context(replaced(torch.amp.GradScaler, "_unscale_grads_", unscale))
        yield


def _hooked_first(parameter: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Register a hook that runs before the hooks of the user's code; returns its handle."""
    handle = on_gradient(parameter, hook)
    hooks: Any = parameter._backward_hooks  # noqa: SLF001 torch has no public way to put a tensor's hook first
    registered = list(hooks.items())
    hooks.clear()
    hooks.update([registered[-1], *registered[:-1]])
    return handle


def fix_scaler_misuse(misuse: str, trials: Trials, session: Session, *, overflowed: bool = False) -> Prescription:
    """Returns the prescription for a misuse (a key of `MISUSE_ADVICE`), after a replay of the corrected step."""
    advice = MISUSE_ADVICE.get(misuse, HELP["scaler_misuse"])
    changes: dict[str, Change] = {
        "optimizer.step": unscaled_on_arrival,
        "clip_grad_norm_": unscaled_on_arrival,
        "gradient clipping": unscaled_on_arrival,
        "unscale": unscaled_by_the_step,
        "scaler.unscale_": each_unscaled_on_arrival,
        "backward": each_unscaled_on_arrival,
        "scaler.step": each_unscaled_on_arrival,
        "Tensor.grad": each_unscaled_on_arrival,
        "autograd.grad": asked_for_unscaled,
        "GradScaler.scale": scaled_once,
        "zero_grad": cleared,
        "optimizer.zero_grad": cleared_of_others,
    }
    change = changes.get(misuse)
    if change is None:
        return Prescription(
            kind="code", value=advice, status="not_run", detail=advice, reason="no replay can stand in for it"
        )
    scale = session.events.scale()
    tried: Prescription | None = None
    for binades in LOWER if overflowed and scale is not None else (0,):
        lowered = change if not binades or scale is None else both(change, loss_scale(scale / 2.0**binades))
        beside = f" (and a loss scale of {exact(scale / 2.0**binades)})" if binades and scale is not None else ""
        restores = change is cleared_of_others  # fp32 also adds to the gradients that are left
        tried = trials.attempt("code", advice, lowered, advice + beside, stands_in=True, restores=restores)
        if tried.status == "intervention":
            break
    return tried or Prescription(kind="code", value=advice, status="not_run", detail=advice, reason="nothing was tried")


def after_refusal(session: Session, halves: HalfWeights | None, raised: str) -> str:
    """Returns the advice for a call that the scaler refused in the last replayed step."""
    held = {id(p): p for p in optimizer_parameters(session)}
    gradients = [p.grad for p in held.values() if p.grad is not None]
    kinds = {event.kind for event in session.events.events}
    if halves is not None:
        advice = HALF_WEIGHTS
    elif "scale" not in kinds:
        advice = MISUSE_ADVICE["backward"]
    elif "optimizer_step" in kinds and "step" not in kinds:
        advice = MISUSE_ADVICE["optimizer.step"]
    elif not gradients:
        advice = WITHOUT_GRADIENTS
    else:
        advice = refusal_advice(raised)
    return advice


# -- values that a checkpoint lost --


def repaired(places: Sequence[Where]) -> Callable[[Session], AbstractContextManager[Any]]:
    """Returns a change: broken elements at `places` become the median of the others, and all broken moments 0."""

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        wanted = {_key(where) for where in places}
        masks: dict[str, torch.Tensor] = {}
        for kind, name, tensor in state_tensors(session):
            if not tensor.is_floating_point() or not (name in wanted or kind == "optimizer_state"):
                continue  # a file may not name the parameters of its moments
            bad = _broken(name, tensor.detach())
            if kind == "optimizer_state":
                owner = name.partition(":")[0]
                masks[owner] = masks[owner] | bad if owner in masks and masks[owner].shape == bad.shape else bad
            else:
                with torch.no_grad():
                    tensor[bad] = _usual(name, tensor.detach(), bad)
        for kind, name, tensor in state_tensors(session):
            mask = masks.get(name.partition(":")[0]) if kind == "optimizer_state" else None
            if mask is not None and mask.shape == tensor.shape and tensor.is_floating_point():
                tensor[mask] = 0.0
        session.state_loaded()
        yield

    return change


def repair(places: Sequence[Where], trials: Trials) -> Prescription:
    """Returns the prescription for broken state: its values are lost, but the rest of the run is shown to be sound."""
    names = list(dict.fromkeys(where.tensor or "" for where in places))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return trials.attempt(
        "code",
        f"replace {shown}",
        repaired(places),
        f"Resume from a checkpoint in which {shown} is sound. Replayed with the broken elements replaced (weights and "
        "buffers by the median of the others, moments by 0): their own values are lost.",
        stands_in=True,
        restores=True,
    )


def _key(where: Where) -> str:
    op = where.op or ""
    entry = op.removeprefix("optimizer_state:")
    return f"{where.tensor}:{entry}" if entry != op else where.tensor or ""


def _broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
    leaf = name.rpartition(":")[2].rpartition(".")[2]
    bad = ~torch.isfinite(tensor)
    if leaf in NEVER_NEGATIVE:
        bad |= tensor < 0
    return bad


def _usual(name: str, tensor: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    sound = tensor[~bad]
    if sound.numel():
        return sound.float().median().to(tensor.dtype)
    return tensor.new_tensor(1.0 if name.rpartition(".")[2] in NEVER_NEGATIVE else 0.0)
