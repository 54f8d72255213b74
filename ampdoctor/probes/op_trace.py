"""Traces one step op by op: where non-finite values first appear, what they reach, and which gradients become zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from ampdoctor.errors import AmpdoctorError, ReplayError, UserCodeError
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.trace import (
    Died,
    Flush,
    LeftOut,
    NonFiniteOrigin,
    Operand,
    Origin,
    PropagationPath,
    Recomputation,
    TensorStats,
    Trace,
)
from ampdoctor.hooks.interfaces import ObservedRun, describe, is_out_of_memory
from ampdoctor.hooks.torch_internals import no_modes
from ampdoctor.precision.casting import REDUCED
from ampdoctor.probes.lost_values import Provenance
from ampdoctor.probes.modules import is_watched, tensors_in
from ampdoctor.probes.nan_path import Readings, Ways
from ampdoctor.probes.nonfinite import (
    FiniteBeside,
    dense,
    holds_nan,
    is_nonfinite,
    kind_of,
    outside_gradients,
    state_tensors,
    stats_of,
    trained_parameters,
)
from ampdoctor.probes.nonfinite_origin import described, nonfinite_number, operand_of
from ampdoctor.probes.ops import (
    CONSTANTS,
    FILLS_A_PART,
    SUMS,
    UNINITIALISED,
    OpProbe,
    Ran,
    Site,
    Split,
    kernel_name,
    split_calls,
    written,
)
from ampdoctor.probes.recompute import doubled, recompute, widely
from ampdoctor.probes.tensor_memory import NONE, Belongings, ByMemory, OriginIds, Taint, covers, storage_key, union

# -- gradients that are zero throughout --


class Dead:
    """Follows zeros through the memory of a backward, from the op that makes them to the parameters that get them."""

    def __init__(self) -> None:
        self._by: ByMemory[int] = ByMemory()
        self._sites: list[tuple[int, Site]] = []
        self._parameters: dict[str, int] = {}

    def clear(self) -> None:
        self._by.clear()
        self._sites.clear()
        self._parameters.clear()

    def note(self, ran: Ran, order: int) -> None:
        inherited = next((i for t in ran.call.reads if (i := self._by.get(storage_key(t))) is not None), None)
        for result in ran.results:
            key = storage_key(result)
            if not result.numel() or bool(torch.count_nonzero(result)):
                self._by.pop(key, None)
            elif inherited is not None:
                self._by[key] = inherited
            elif any(bool(torch.count_nonzero(t)) for t in ran.call.before):
                self._by[key] = len(self._sites)
                self._sites.append((order, ran.site))

    def reaches(self, name: str, gradient: torch.Tensor) -> None:
        index = self._by.get(storage_key(gradient))
        if index is not None and not bool(torch.count_nonzero(gradient)):
            self._parameters[name] = index
        else:
            self._parameters.pop(name, None)

    def died(self, step: int) -> tuple[Died, ...]:
        """Returns the parameters that got zeros, with the op that made them, in the order in which they got them."""
        sites = ((name, *self._sites[index]) for name, index in self._parameters.items())
        return tuple(Died(parameter=name, order=order, where=site.where(step, "none")) for name, order, site in sites)


# -- optional parts of a trace --


class SideSearches:
    """Runs the optional parts of a trace, all but the origin itself: an error there only removes that part."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], LeftOut] = {}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The parts that failed, each with the op at which it failed first."""
        return tuple(self._failed.values())

    @contextmanager
    def costing(self, note: str, kernel: str) -> Iterator[None]:
        """Record an error of the body as the missing `note`; errors for lack of memory are raised."""
        with own_work(lambda error: self._keep(note, kernel, error)):
            yield

    def _keep(self, note: str, kernel: str, error: Exception) -> None:
        self._failed.setdefault((note, kernel), LeftOut(what=note, op=f"aten.{kernel}", reason=describe(error)))


@contextmanager
def own_work(failed: Callable[[Exception], None]) -> Iterator[None]:
    """Pass errors of the body to `failed`, which may raise; ampdoctor's own errors and lack of memory are raised."""
    try:
        yield
    except AmpdoctorError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        failed(error)


# -- the trace --
#
# An origin is an op whose inputs were finite and whose result is not. Its descendants are followed through memory, not
# through names, so in-place ops, views, module boundaries and the backward do not break the path. The op is run again
# in float64 at once, so no tensor is kept.


class NonFiniteOpsProbe(OpProbe):
    """Notes whether an op leaves a NaN or an infinity; where none does, a trace finds no origin that an op makes."""

    def begin(self) -> None:
        self.found = False

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - the base's signature
        result = func(*args, **kwargs)
        if not (self.found or func.is_view or kernel_name(func) in UNINITIALISED):
            self.found = any(map(is_nonfinite, (*tensors_in(result), *written(func, args, kwargs))))
        return result


class OpTraceProbe(OpProbe):
    """Traces the steps that run while it is attached; `trace` is that of the last finished step.

    With `flushes`, it also looks for gradients that an op of the backward flushes to zero: each such op runs twice.
    """

    def __init__(self, *, flushes: bool = False) -> None:
        super().__init__()
        self.trace: Trace | None = None
        self._look_for_flushes = flushes
        self._aside = SideSearches()
        self._dead = Dead()
        self._taint = Taint()
        self._ways = Ways()

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        self._run = run
        self._names = run.parameter_names()
        trained = trained_parameters(run)
        handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in run.model.parameters()
            if parameter.requires_grad and parameter.is_leaf and id(parameter) in trained
        ]
        try:
            with super().attach(run):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        self._ops = 0
        self._origins: list[NonFiniteOrigin] = []
        self._forward_origins: dict[int, int] = {}
        self._given: ByMemory[int] = ByMemory()
        self._blank: ByMemory[Site] = ByMemory()
        self._finite: ByMemory[Site] = ByMemory()
        self._departs: dict[int, float] = {}
        self._flushes: list[Flush] = []
        self._affected: dict[str, OriginIds] = {}
        self._readings = Readings()
        self._aside = SideSearches()
        self._dead.clear()
        self._taint.clear()
        self._ways.clear(self._step)
        self._belongings = Belongings(self._run, self._step)
        self._provenance = Provenance(self._belongings.name_of)
        brought = self._belongings.nonfinite
        self._before = {id(t) for t in brought if not holds_nan(t)}
        self._unread = {id(t) for t in brought}
        self._beside = FiniteBeside(self._run)

    def finish(self, step: int, loss: Any) -> None:
        if isinstance(loss, torch.Tensor) and is_nonfinite(loss):
            self._harm("loss", loss)
        elif isinstance(loss, float) and not math.isfinite(loss):
            self._harm("loss", loss, self._readings.number)  # a step that returns `loss.item()`
        elif isinstance(loss, UserCodeError):
            # the user's code read a non-finite value and raised an exception
            asked = frozenset(i for i in self._readings.asked if self._origins[i].came_from != "constant")
            self._harm("raised", None, asked)
        self._harm_state()
        self.trace = self._gathered()
        self._dead.clear()
        self._taint.clear()
        self._ways.clear(step)
        self._provenance.clear()
        self._sites.clear()

    def _harm_state(self) -> None:
        """Note affected parameters, buffers and optimizer state, and gradients without hook."""
        for kind, name, tensor in state_tensors(self._run):
            if id(tensor) not in self._before and is_nonfinite(tensor):
                if id(tensor) in self._unread and not self._taint.origins(tensor):
                    continue  # it was non-finite before the step, and no op read it
                self._harm(f"{kind}:{name}", tensor)
        for name, gradient in outside_gradients(self._run):
            if is_nonfinite(gradient):
                self._harm(f"grad:{name}", gradient)
        for name, tensor in self._beside.harmed():
            self._harm(f"beside:{name}", tensor)

    def _gathered(self) -> Trace:
        origins = tuple(
            replace(
                origin,
                affected=tuple(target for target, ids in self._affected.items() if index in ids),
                departs=self._departs.get(index, 0.0),
                way=self._way(index, origin),
            )
            for index, origin in enumerate(self._origins)
        )
        return Trace(
            step=self._step,
            ops=self._ops,
            origins=origins,
            flushes=tuple(self._flushes),
            died=self._dead.died(self._step),
            unattributed=tuple(target for target, ids in self._affected.items() if not ids and target != "raised"),
            left_out=self._aside.left_out,
        )

    def _way(self, index: int, origin: NonFiniteOrigin) -> PropagationPath:
        ways = [origin.way]
        with self._aside.costing("the way of an origin", origin.kernel.partition(".")[2]):
            ways.append(self._ways.way(index, origin.order, origin.way.before))
        return ways[-1]

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        kernel = kernel_name(func)
        self._ops += 1
        self._belongings.entering(site)
        nested = any(t.is_nested for t in tensors_in([*args, *kwargs.values()]))
        if nested:  # lacks most kernels; its values are checked once they are dense again
            return func(*args, **kwargs)
        if kernel in UNINITIALISED:
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and is_watched(result):
                self._taint.forget(result)
                self._blank[storage_key(result)] = site  # what is not finite there before a write was made by no op
            return result
        with _own_work(kernel):
            calls = split_calls(func, args, kwargs)
            dirty = [self._read_nonfinite(kernel, call) for call in calls]
        try:
            result = func(*args, **kwargs)
        except Exception:  # e.g. `multinomial` and solvers reject non-finite inputs
            self._readings.refused([t for bad in dirty for t in bad], site, self._inherited)
            raise
        with _own_work(kernel):
            for call, bad in zip(calls, dirty, strict=True):
                returned = result if call.element is None else None
                ran = Ran(func, kernel, site, call, bad, call.results(result), returned)
                with self._aside.costing("what the step's code has read", kernel):
                    self._readings.note(ran, self._inherited)
                self._examine(ran)
                self._note_makers(ran)
        return result

    def _note_makers(self, ran: Ran) -> None:
        """Record what made the zeros and ones of the results; if that fails, drop what was known of them."""
        noted = False
        with self._aside.costing("what made the operands", ran.kernel):
            self._provenance.note(ran)
            noted = True
        if not noted:
            for tensor in ran.results:
                self._provenance.forget(tensor)

    def _examine(self, ran: Ran) -> None:
        poisoned = [t for t in ran.results if is_nonfinite(t)]
        marked = {id(t) for t in poisoned}
        for tensor in ran.results:
            if id(tensor) not in marked:
                self._taint.clean(tensor)
                self._note_finite(tensor, ran)
        if self._look_for_flushes and ran.site.phase == "backward" and not poisoned and not ran.bad:
            with self._aside.costing("gradients that are flushed", ran.kernel):
                self._look_for_flush(ran)
                self._dead.note(ran, self._ops)
        reference: list[torch.Tensor] | None = None
        with self._aside.costing("how far finite values depart", ran.kernel):
            reference = self._follow_shadows(ran)
        if not poisoned:
            with self._aside.costing("the way to an origin", ran.kernel):
                self._ways.pass_finite(ran, self._ops)
            return
        reads_none = all(map(self._is_unwritten, ran.bad)) and all(map(self._is_unwritten, poisoned))
        if reads_none and (ran.kernel in FILLS_A_PART or (ran.bad and _shows_memory(ran))):
            return  # of a buffer that is not written as a whole a part is shown, or filled
        origins, wide = self._parents(ran)
        born = any(self._origins[index].order == self._ops for index in origins)
        with self._aside.costing("the way of an origin", ran.kernel):
            self._ways.carry(ran, poisoned, origins, self._ops, born=born)
        for tensor in poisoned:
            self._taint.mark(tensor, origins, added=ran.call.in_place)
        twins = wide or reference
        if twins is not None:
            with self._aside.costing("how far finite values depart", ran.kernel):
                for tensor, meant in zip(ran.results, twins, strict=True):
                    if id(tensor) in marked:
                        self._taint.cast_shadow(tensor, meant)

    def _parents(self, ran: Ran) -> tuple[OriginIds, list[torch.Tensor] | None]:
        """The origins that a non-finite result descends from; for a new origin also its results in float64."""
        site = ran.site
        if ran.bad:
            origins = self._inherited(ran.bad, site)
            spoiled = kind_of(ran.results) == "nan" or ran.kernel in SUMS
            written = all(self._origins[index].came_from == "constant" for index in origins)  # by the user
            if not (written and spoiled and kind_of(ran.bad) == "inf"):
                return origins, None
            # intended infinities (a mask) became NaN or were added up here: this op is the origin
        if site.phase == "backward" and site.sequence in self._forward_origins:
            # the forward op was outside its domain already, at the same operand: log(0), then 0/0 in its derivative
            return frozenset({self._forward_origins[site.sequence]}), None
        if not ran.bad and _shows_memory(ran):  # a view of more memory than the input showed
            return union(self._taint.origins(t) or self._brought(t, site) for t in ran.results if is_nonfinite(t)), None
        if self._readings.number and ran.kernel not in CONSTANTS and nonfinite_number(ran) is not None:
            return self._readings.number, None  # through Python: `float(norm)`, then a factor
        index, wide = self._origin(ran)
        if site.sequence is not None and site.phase in ("forward", "loss"):
            self._forward_origins[site.sequence] = index
        return frozenset({index}), wide

    def _inherited(self, bad: Sequence[torch.Tensor], site: Site) -> OriginIds:
        """The origins behind non-finite inputs; if some hold NaN, those that hold only infinities are ignored."""
        nans = [t for t in bad if holds_nan(t)]
        return union(self._taint.origins(t) or self._brought(t, site) for t in nans or bad)

    def _origin(self, ran: Ran) -> tuple[int, list[torch.Tensor] | None]:
        call, site = ran.call, ran.site
        verdict: Recomputation | None = None
        wide: list[torch.Tensor] = []
        if call.repeatable:
            with self._aside.costing("the op in float64", ran.kernel):
                verdict, wide = recompute(ran.func, call, ran.results)
        constant = ran.kernel in CONSTANTS or not call.reads
        came_from: Origin = "constant" if constant and (verdict is None or not verdict.finite) else "op"
        tensor = (
            self._belongings.parameter_of([*ran.results, *call.reads])
            if site.phase in ("optimizer", "scaler")
            else None
        )
        if tensor is not None:
            site = replace(site, module=tensor.rpartition(".")[0])
        operand: Operand | None = None
        inputs: tuple[TensorStats, ...] = ()
        way = PropagationPath()
        if came_from == "op":
            with self._aside.costing("what made the operand", ran.kernel):
                meant = next((self._origins[i].where for t in ran.bad for i in sorted(self._taint.origins(t))), None)
                operand = operand_of(ran, verdict, self._provenance, meant)
        with self._aside.costing("the numbers of the inputs", ran.kernel):
            inputs = self._described(call)
        with self._aside.costing("the way to an origin", ran.kernel):
            way = PropagationPath(before=self._ways.before(call.reads))
        index = len(self._origins)
        self._origins.append(
            NonFiniteOrigin(
                order=self._ops,
                where=_named(site.where(self._step, kind_of(ran.results), tensor), ran),
                came_from=came_from,
                kernel=f"{ran.func.namespace}.{ran.kernel}",
                inputs=inputs,
                outputs=tuple(map(stats_of, ran.results)),
                recomputed=verdict,
                operand=operand,
                way=way,
                after_backward=site.after_backward,
            )
        )
        return index, wide or None

    def _brought(self, tensor: torch.Tensor, site: Site) -> OriginIds:
        """The origin for a non-finite input that no op of the step made: batch, state or a constant."""
        key = storage_key(tensor)
        nobodys = key not in self._given and self._belongings.name_of(tensor) is None
        if nobodys and key in self._blank:
            self._given[key] = len(self._origins)
            self._origins.append(self._past_torch(tensor, self._blank[key], "unwritten"))
        elif nobodys and key in self._finite:
            self._given[key] = len(self._origins)
            self._origins.append(self._past_torch(tensor, self._finite[key], "unseen"))
        if key not in self._given:
            where, came_from = self._belongings.origin_of(tensor, site)
            self._given[key] = len(self._origins)
            first = self._belongings.first_in_batch(tensor) if came_from == "data" else ()
            between = came_from == "constant" and site.after_backward
            brought = NonFiniteOrigin(order=-1, where=where, came_from=came_from, kernel="", index=first)
            self._origins.append(replace(brought, outputs=(stats_of(tensor),), after_backward=between))
        index = self._given[key]
        self._taint.mark(tensor, frozenset({index}), added=False)
        return frozenset({index})

    def _read_nonfinite(self, kernel: str, call: Split) -> list[torch.Tensor]:
        """The non-finite inputs whose values the op reads."""
        bad = [t for t in call.reads if is_nonfinite(t)]
        arguments = (*call.args, *call.kwargs.values())
        adds = any(value is True or isinstance(value, str) for value in arguments)  # by `accumulate`, or `reduce`
        if bad and kernel in FILLS_A_PART and not adds:
            return [t for t in bad if not (any(t is w for w in call.writes) and self._is_unwritten(t))]
        return bad

    def _is_unwritten(self, tensor: torch.Tensor) -> bool:
        """No op has left a non-finite value in this uninitialised memory."""
        return storage_key(tensor) in self._blank and not self._taint.origins(tensor)

    def _note_finite(self, tensor: torch.Tensor, ran: Ran) -> None:
        """Record the op that made memory which is finite throughout: non-finite values there later come from no op."""
        if tensor.dtype.is_floating_point and not _shows_memory(ran) and covers(tensor):
            self._finite[storage_key(tensor)] = ran.site

    def _past_torch(self, tensor: torch.Tensor, made: Site, how: Literal["unwritten", "unseen"]) -> NonFiniteOrigin:
        """An origin in memory that a torch op made and no op has written since."""
        return NonFiniteOrigin(
            order=self._ops,
            where=made.where(self._step, kind_of([tensor])),
            came_from="op",
            kernel=f"aten.{made.op}",
            outputs=(stats_of(tensor),),
            operand=described(None, how, here=None),
        )

    def _described(self, call: Split) -> tuple[TensorStats, ...]:
        return tuple(
            replace(stats_of(before), name=self._belongings.label(tensor))
            for tensor, before in zip(call.reads, call.before, strict=True)
        )

    def _follow_shadows(self, ran: Ran) -> list[torch.Tensor] | None:
        """Run the op in float64 on the real inputs and on those without origins; note how far finite results differ."""
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
            for origin in union(self._taint.origins(t) for t in shadowed):
                self._departs[origin] = max(self._departs.get(origin, 0.0), far)
        return meant

    def _look_for_flush(self, ran: Ran) -> None:
        """Count the elements that are zero here and nonzero in float64, from the same inputs."""
        if not ran.call.repeatable or not any(t.dtype in REDUCED for t in ran.results):
            return
        wide = widely(ran.func, ran.call)
        if [t.shape for t in wide] != [t.shape for t in ran.results]:
            return
        for result, reference in zip(ran.results, wide, strict=True):
            nonzero = reference != 0
            count = int(nonzero.sum())
            flushed = int((nonzero & (result == 0)).sum())
            if flushed and result.dtype in REDUCED:
                self._flushes.append(
                    Flush(
                        order=self._ops,
                        where=ran.site.where(self._step, "none"),
                        fraction=flushed / count,
                        amax=float(reference.abs().max()),
                    )
                )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction(), no_modes():
            if parameter.grad is None:
                return
            if self._look_for_flushes:
                with self._aside.costing("gradients that are flushed", "accumulate_grad"):
                    self._dead.reaches(self._names[id(parameter)], parameter.grad)
            if is_nonfinite(parameter.grad):
                self._harm(f"grad:{self._names[id(parameter)]}", parameter.grad)

    def _harm(self, target: str, value: torch.Tensor | float | None, origins: OriginIds = NONE) -> None:
        origins |= self._taint.origins(value) if isinstance(value, torch.Tensor) else NONE
        self._affected[target] = self._affected.get(target, NONE) | origins
        with self._aside.costing("the way of an origin", target.partition(":")[0]):
            self._ways.arrive(target, value, origins, self._ops)


@contextmanager
def _own_work(kernel: str) -> Iterator[None]:
    """Raise errors of the body as a defect of ampdoctor: the user's code, also on the stack, must not be blamed."""

    def refuse(error: Exception) -> None:
        raise ReplayError(
            f"ampdoctor failed to examine aten.{kernel} ({describe(error)}): this is a defect of ampdoctor's, please "
            "report it"
        ) from error

    with own_work(refuse):
        yield


def _named(where: Where, ran: Ran) -> Where:
    """The address with the op's own namespace, for an operator of another library that no torch function called."""
    own = ran.func.namespace
    return where if own == "aten" or where.op != f"aten.{ran.kernel}" else replace(where, op=f"{own}.{ran.kernel}")


def _shows_memory(ran: Ran) -> bool:
    """Whether the op only returns views, by its schema or its results: a view of torch's makes no new values."""
    if ran.call.reshapes:
        return True
    read = {storage_key(t) for t in tensors_in([*ran.call.args, *ran.call.kwargs.values()])}
    return ran.func.namespace == "aten" and not ran.call.in_place and all(storage_key(t) in read for t in ran.results)


def _departure(result: torch.Tensor, here: torch.Tensor, there: torch.Tensor) -> float:
    """Largest relative difference among finite results between the real inputs and those without the origins.

    Both are computed in float64 from inputs that agree wherever the real ones are finite. So an element that does not
    descend from an origin has a difference of exactly 0, and rounding plays no part.
    """
    real, meant = (doubled(dense(tensor)) for tensor in (here, there))
    fine = torch.isfinite(dense(result.detach())) & torch.isfinite(real) & torch.isfinite(meant)
    apart = (real - meant).abs()[fine] / meant.abs()[fine].clamp(min=torch.finfo(torch.float32).tiny)
    return float(apart.max()) if apart.numel() else 0.0
