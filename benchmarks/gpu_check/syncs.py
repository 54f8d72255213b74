"""Watching a step never waits for the device, but for two reads: the loss scale, and all flags at once at its end.

Two witnesses. torch's profiler names every op that reads a value on the host, also those of ours that hide from modes
and traces (`hooks.torch_internals.unseen`). On a GPU torch's own debug mode raises at whatever else waits, a copy
to the host too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from ampdoctor.numerics.counting import DeviceCounts, device_counts
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.replay.session import Session
from benchmarks.gpu_check.section import Section
from benchmarks.overhead import language_model_loss, make_run

READ_ON_THE_HOST = frozenset(
    f"aten::{op}"
    for op in ("_local_scalar_dense", "nonzero", "equal", "bincount", "masked_select", "_unique2", "unique_consecutive")
)
_READING = "a read that a step is allowed"


class ReadsAtTheEnd(NonFiniteProbe):
    """The probe, whose own read of its flags is allowed."""

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        return _allowed(super()._read)(*args, **kwargs)


def measure(device: torch.device, **size: int) -> Section:
    """Take a step bare and watched, count some histograms, and name what waited."""
    with autocast_policy("cuda"):
        session = Session(make_run(precision="fp16", **size), device=device)
        try:
            return _measured(session)
        finally:
            session.close()


def _measured(session: Session) -> Section:
    if not session.has_step(0):
        raise RuntimeError("the run has no batch")
    session.step(0)  # what is made at first use is there now
    session.scaler.get_scale = _allowed(session.scaler.get_scale)
    batch, probe = session.batches_of(0)[0], ReadsAtTheEnd()
    found = {"a bare step": waits(partial(_forward_and_backward, session, batch))}
    with session.watched(probe):
        found["a watched step"] = waits(partial(_watched_step, session, batch, probe))
    found["histograms"] = waits(partial(_counted, session))
    differences = [f"a bare step waits by itself: {name}" for name in found["a bare step"]]
    for what, names in found.items():
        beyond = Counter(names) - Counter(found["a bare step"])
        differences += [f"{what} waits for the device, {count} times: {name}" for name, count in beyond.items()]
    return Section(rows=found, differences=tuple(differences))


def waits(work: Callable[[], object]) -> list[str]:
    """What waited for the device while the work ran, in order: ops, or the sentence in which torch refused one."""
    refused = []
    with _debug_mode("error"), profile(use_kineto=False) as profiled:
        try:
            work()
        except RuntimeError as error:
            refused.append(str(error).splitlines()[0])
    events = profiled.function_events or ()
    return [event.name for event in events if event.name in READ_ON_THE_HOST and not _is_allowed(event)] + refused


def _is_allowed(event: Any) -> bool:
    while event is not None and event.name != _READING:
        event = event.cpu_parent
    return event is not None


def _allowed(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(_READING), _debug_mode("default"):
            return read(*args, **kwargs)

    return call


@contextmanager
def _debug_mode(mode: str) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _forward_and_backward(session: Session, batch: torch.Tensor) -> torch.Tensor:
    session.optimizers["optimizer"].zero_grad(set_to_none=True)
    with session.precision.context(session.device.type)():
        loss = language_model_loss(session.model, batch)
    session.scaler.scale(loss).backward()
    return loss


def _watched_step(session: Session, batch: torch.Tensor, probe: NonFiniteProbe) -> None:
    with probe.during(0):
        loss = _forward_and_backward(session, batch)
    probe.finish(0, loss)


def _counted(session: Session) -> DeviceCounts:
    return reduce(add, (device_counts(parameter.detach()) for parameter in session.model.parameters()))
