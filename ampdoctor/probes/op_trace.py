"""The close look: one step traced op by op, from every harmed value back to the ops where its poison was born.

A birth is an op whose inputs were finite and whose result is not. Its descendants are followed through memory, not
through names, so in-place ops, views, module boundaries and the backward do not break the path. The op is run again in
float64 on the spot, so no tensor is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampdoctor.errors import UserCodeError
from ampdoctor.evidence.trace import Birth, Flush, Origin, Recomputation, TensorStats, Trace
from ampdoctor.evidence.where import NonFinite, Where
from ampdoctor.numerics import nonfinite_flag
from ampdoctor.probes.arguments import Split, split_calls
from ampdoctor.probes.naming import CONSTANTS, OVERWRITES, UNINITIALISED, kernel_name
from ampdoctor.probes.nonfinite import holds_nan, is_mask, outside_gradients, state_tensors, trained_parameters
from ampdoctor.probes.readings import Readings
from ampdoctor.probes.recompute import doubled, recompute, widely
from ampdoctor.probes.sites import Site, Sites
from ampdoctor.probes.taint import NONE, Births, Taint, storage_key, union
from ampdoctor.probes.tensors import is_watched

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session

_HALF = (torch.float16, torch.bfloat16)


def is_nonfinite(tensor: torch.Tensor) -> bool:
    """Say exactly whether a tensor holds a NaN or an infinity; the cheap sum goes first, it has no false negatives."""
    if not is_watched(tensor) or tensor.numel() == 0 or bool(torch.isfinite(nonfinite_flag(tensor))):
        return False
    dense = tensor.detach()
    dense = dense.coalesce().values() if dense.layout is torch.sparse_coo else dense
    return not bool(torch.isfinite(dense.float() if dense.element_size() == 1 else dense).all())


@dataclass(frozen=True, slots=True)
class _Ran:
    """An op that ran: what, where, on what, and what came of it."""

    func: Any
    kernel: str
    site: Site
    call: Split
    bad: list[torch.Tensor]
    """Inputs that were non-finite before it ran."""
    results: list[torch.Tensor]


class OpTraceProbe(TorchDispatchMode):
    """Traces the steps that run while it is attached.

    Args:
        flushes: Also look for gradients that an op of the backward flushes to zero; each such op runs twice.

    Attributes:
        trace: Of the step that was finished last; None before.
    """

    def __init__(self, *, flushes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self.trace: Trace | None = None
        self._look_for_flushes = flushes
        self._sites = Sites()
        self._taint = Taint()

    # -- the probe's seam ------------------------------------------------------------------------------------------

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        """Module hooks, and a look at each gradient as the backward writes it."""
        self._session = session
        self._names = session.parameter_names()
        trained = trained_parameters(session)
        handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in session.model.parameters()
            if parameter.requires_grad and parameter.is_leaf and id(parameter) in trained
        ]
        try:
            with self._sites.attach(session):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """The dispatch mode and the function mode are on."""
        self._step = step
        self._ops = 0
        self._births: list[Birth] = []
        self._forward_births: dict[int, int] = {}
        self._given: dict[int, int] = {}
        self._departs: dict[int, float] = {}
        self._flushes: list[Flush] = []
        self._harms: dict[str, Births] = {}
        self._readings = Readings()
        self._taint.clear()
        self._sites.clear()
        before = [(kind, name, t) for kind, name, t in state_tensors(self._session) if is_nonfinite(t)]
        self._before = {id(t) for _, _, t in before if not holds_nan(t)}
        self._unread = {id(t) for _, _, t in before}
        self._masks = {name for kind, name, t in before if kind == "buffer" and is_mask(t)}
        self._owners = {storage_key(t): (kind, name) for kind, name, t in state_tensors(self._session)}
        for parameter in self._session.model.parameters():
            if parameter.grad is not None and is_nonfinite(parameter.grad):  # of an earlier step, and not cleared
                self._owners[storage_key(parameter.grad)] = ("grad", self._names[id(parameter)])
        with self, self._sites.functions.watching():
            yield

    def finish(self, step: int, loss: Any) -> None:
        """Gather what was harmed, and by which births."""
        if isinstance(loss, torch.Tensor) and is_nonfinite(loss):
            self._harm("loss", loss)
        elif isinstance(loss, float) and not math.isfinite(loss):
            self._harms["loss"] = self._readings.number  # a step that returns `loss.item()`
        elif isinstance(loss, UserCodeError):
            self._harms["raised"] = frozenset(i for i in self._readings.asked if self._births[i].origin != "constant")
        for kind, name, tensor in state_tensors(self._session):
            if id(tensor) not in self._before and is_nonfinite(tensor):
                if id(tensor) in self._unread and not self._taint.births(tensor):
                    continue  # it was so before, and no op looked at it
                self._harm(f"{kind}:{name}", tensor)
        for name, gradient in outside_gradients(self._session):
            if is_nonfinite(gradient):
                self._harm(f"grad:{name}", gradient)
        births = tuple(
            replace(
                birth,
                harms=tuple(sink for sink, origins in self._harms.items() if index in origins),
                departs=self._departs.get(index, 0.0),
            )
            for index, birth in enumerate(self._births)
        )
        self.trace = Trace(
            step=step,
            ops=self._ops,
            births=births,
            flushes=tuple(self._flushes),
            unattributed=tuple(sink for sink, origins in self._harms.items() if not origins and sink != "raised"),
        )
        self._taint.clear()
        self._sites.clear()

    # -- every op ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            kernel = kernel_name(func)
            site = self._sites.of(kernel)
            self._ops += 1
            if kernel in UNINITIALISED:
                fresh = func(*args, **kwargs)
                self._taint.forget(fresh)
                return fresh
            calls = split_calls(func, args, kwargs, kernel in OVERWRITES)
            dirty = [[t for t in call.reads if is_nonfinite(t)] for call in calls]
            result = func(*args, **kwargs)
            for call, bad in zip(calls, dirty, strict=True):
                ran = _Ran(func, kernel, site, call, bad, call.results(result))
                self._readings.note(ran, self._inherited)
                self._examine(ran)
            return result

    def _examine(self, ran: _Ran) -> None:
        poisoned = [t for t in ran.results if is_nonfinite(t)]
        marked = {id(t) for t in poisoned}
        for tensor in ran.results:
            if id(tensor) not in marked:
                self._taint.clean(tensor)
        if self._look_for_flushes and ran.site.phase == "backward" and not poisoned and not ran.bad:
            self._look_for_flush(ran)
        reference = self._follow_shadows(ran)
        if not poisoned:
            return
        births, wide = self._parents(ran)
        twins: Sequence[torch.Tensor | None] = wide or reference or [None] * len(ran.results)
        for tensor, meant in zip(ran.results, twins, strict=True):
            if id(tensor) in marked:
                self._taint.mark(tensor, births, added=ran.call.in_place)
                if meant is not None:
                    self._taint.cast_shadow(tensor, meant)

    def _parents(self, ran: _Ran) -> tuple[Births, list[torch.Tensor] | None]:
        """The births that a non-finite result descends from, and for a new one its float64 twin."""
        site = ran.site
        if ran.bad:
            births = self._inherited(ran.bad, site)
            meant = all(self._births[index].origin == "constant" for index in births)
            if not (meant and _kind(ran.results) == "nan" and _kind(ran.bad) == "inf"):
                return births, None
            # infinities that were meant (a mask) became NaN here: this op is where that went wrong
        if site.phase == "backward" and site.sequence in self._forward_births:
            # the op left its domain in the forward already, at the same operand: log(0), then 0/0 in its derivative
            return frozenset({self._forward_births[site.sequence]}), None
        index, wide = self._birth(ran)
        if site.sequence is not None and site.phase in ("forward", "loss"):
            self._forward_births[site.sequence] = index
        return frozenset({index}), wide

    def _inherited(self, bad: Sequence[torch.Tensor], site: Site) -> Births:
        """The births behind non-finite inputs; beside a NaN, an infinity is no ancestor of note."""
        nans = [t for t in bad if bool(torch.isnan(_dense(t)).any())]
        return union(self._taint.births(t) or self._brought(t, site) for t in nans or bad)

    def _birth(self, ran: _Ran) -> tuple[int, list[torch.Tensor] | None]:
        call, site = ran.call, ran.site
        verdict: Recomputation | None = None
        wide: list[torch.Tensor] = []
        if call.repeatable:
            verdict, wide = recompute(ran.func, call, ran.results)
        constant = ran.kernel in CONSTANTS or not call.reads
        origin: Origin = "constant" if constant and (verdict is None or not verdict.finite) else "op"
        tensor = self._owner_of(call, ran.results) if site.phase in ("optimizer", "scaler") else None
        if tensor is not None:
            site = replace(site, module=tensor.partition(":")[0].rpartition(".")[0])
        index = len(self._births)
        self._births.append(
            Birth(
                order=self._ops,
                where=site.where(self._step, _kind(ran.results), tensor),
                origin=origin,
                kernel=f"aten.{ran.kernel}",
                inputs=self._described(call),
                outputs=tuple(map(stats_of, ran.results)),
                recomputed=verdict,
            )
        )
        return index, wide or None

    def _brought(self, tensor: torch.Tensor, site: Site) -> Births:
        """A non-finite input that no op of this step made: it came with the batch, the state, or a constant."""
        key = storage_key(tensor)
        if key not in self._given:
            where, origin = self._origin_of(key, tensor, site)
            self._given[key] = len(self._births)
            self._births.append(Birth(order=-1, where=where, origin=origin, kernel="", outputs=(stats_of(tensor),)))
        index = self._given[key]
        self._taint.mark(tensor, frozenset({index}), added=False)
        return frozenset({index})

    def _origin_of(self, key: int, tensor: torch.Tensor, site: Site) -> tuple[Where, Origin]:
        kind, name = self._owners.get(key, ("", ""))
        nonfinite = _kind([tensor])
        if kind == "buffer" and name in self._masks:
            return site.where(self._step, nonfinite, name), "constant"
        if kind in ("param", "buffer", "optimizer_state"):
            path, _, entry = name.partition(":")
            module, _, leaf = path.rpartition(".")
            op = f"optimizer_state:{entry}" if kind == "optimizer_state" else f"state:{leaf}"
            where = Where(step=self._step, phase="checkpoint", module=module, op=op, nonfinite=nonfinite, tensor=path)
            return where, "param" if kind == "param" else "buffer" if kind == "buffer" else "optimizer_state"
        if kind == "grad":
            module = name.rpartition(".")[0]
            where = Where(
                step=self._step, phase="optimizer", module=module, op="zero_grad", nonfinite=nonfinite, tensor=name
            )
            return where, "grad"
        for path, batch_tensor in self._session.current_tensors():
            if storage_key(batch_tensor) == key:
                where = Where(
                    step=self._step,
                    micro_batch=site.micro_batch,
                    phase="data",
                    op="data",
                    nonfinite=nonfinite,
                    tensor=path,
                )
                return where, "data"
        return site.where(self._step, nonfinite), "constant"

    def _owner_of(self, call: Split, results: Sequence[torch.Tensor]) -> str | None:
        """The parameter that an optimizer's or a scaler's op works on."""
        for tensor in (*results, *call.reads):
            kind, name = self._owners.get(storage_key(tensor), ("", ""))
            if kind:
                return name
        for parameter in self._session.model.parameters():
            if parameter.grad is not None and any(parameter.grad is t for t in (*results, *call.reads)):
                return self._names.get(id(parameter))
        return None

    def _described(self, call: Split) -> tuple[TensorStats, ...]:
        batch = {
            storage_key(tensor): f"batch.{path}" if path else "batch"
            for path, tensor in self._session.current_tensors()
        }
        described = []
        for tensor, before in zip(call.reads, call.before, strict=True):
            key = storage_key(tensor)
            kind, name = self._owners.get(key, ("", ""))
            label = f"{kind}:{name}" if kind else batch.get(key)
            described.append(replace(stats_of(before), name=label))
        return tuple(described)

    # -- what stays finite -----------------------------------------------------------------------------------------

    def _follow_shadows(self, ran: _Ran) -> list[torch.Tensor] | None:
        """Run the op on the inputs as they are and as they would have been; note how far finite results depart."""
        call = ran.call
        shadowed = [t for t in ran.bad if self._taint.shadow(t) is not None]
        if not shadowed or not call.repeatable or ran.site.phase not in ("forward", "loss"):
            return None
        real = widely(ran.func, call)
        meant = widely(ran.func, call.substituted(self._taint.shadow))
        if [t.shape for t in meant] != [t.shape for t in ran.results] or len(real) != len(meant):
            return None
        for result, here, there in zip(ran.results, real, meant, strict=True):
            far = _departure(result, here, there)
            for birth in union(self._taint.births(t) for t in shadowed):
                self._departs[birth] = max(self._departs.get(birth, 0.0), far)
        return meant

    def _look_for_flush(self, ran: _Ran) -> None:
        """Which elements are zero here and not in float64, from the same inputs?"""
        if not ran.call.repeatable or not any(t.dtype in _HALF for t in ran.results):
            return
        wide = widely(ran.func, ran.call)
        if [t.shape for t in wide] != [t.shape for t in ran.results]:
            return
        for result, reference in zip(ran.results, wide, strict=True):
            nonzero = reference != 0
            count = int(nonzero.sum())
            flushed = int((nonzero & (result == 0)).sum())
            if flushed and result.dtype in _HALF:
                self._flushes.append(
                    Flush(
                        order=self._ops,
                        where=ran.site.where(self._step, "none"),
                        fraction=flushed / count,
                        amax=float(reference.abs().max()),
                    )
                )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if parameter.grad is not None and is_nonfinite(parameter.grad):
                self._harm(f"grad:{self._names[id(parameter)]}", parameter.grad)

    def _harm(self, sink: str, tensor: torch.Tensor) -> None:
        self._harms[sink] = self._harms.get(sink, NONE) | self._taint.births(tensor)


def stats_of(tensor: torch.Tensor) -> TensorStats:
    """Numbers of one tensor, exactly."""
    dense = _dense(tensor).detach()
    if not is_watched(dense) or dense.numel() == 0:
        return TensorStats(
            dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), amax=0.0, nans=0, infs=0, zeros=0
        )
    wide = dense.to(torch.complex128 if dense.is_complex() else torch.float64)
    fine = wide[torch.isfinite(wide)]
    return TensorStats(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        amax=float(fine.abs().max()) if fine.numel() else 0.0,
        nans=int(torch.isnan(wide).sum()),
        infs=int(torch.isinf(wide).sum()),
        zeros=int((wide == 0).sum()),
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _kind(tensors: Sequence[torch.Tensor]) -> NonFinite:
    """NaN where there is one, else an infinity."""
    watched = [_dense(t) for t in tensors if is_watched(t)]
    if any(bool(torch.isnan(t).any()) for t in watched):
        return "nan"
    return "inf" if any(bool(torch.isinf(t).any()) for t in watched) else "none"


def _departure(result: torch.Tensor, here: torch.Tensor, there: torch.Tensor) -> float:
    """Largest relative difference among finite results between the real inputs and those without the births.

    Both are computed in float64 from inputs that agree wherever the real ones are finite, so an element that does not
    descend from a birth differs by exactly nothing, and rounding plays no part.
    """
    fine = torch.isfinite(doubled(result)) & torch.isfinite(here) & torch.isfinite(there)
    if not bool(fine.any()):
        return 0.0
    here, there = doubled(here[fine]), doubled(there[fine])
    size = there.abs().clamp(min=torch.finfo(torch.float32).tiny)
    return float(((here - there).abs() / size).max())
