"""The path of a non-finite value: its finite inputs, the modules that pass it on, and where user code reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampdoctor.evidence.location import Phase, Where
from ampdoctor.evidence.trace import PathOp, PropagationPath
from ampdoctor.numerics.tensors import describe
from ampdoctor.probes.lost_values import FILLS, MOVES, ROOTS
from ampdoctor.probes.modules import is_watched, tensors_in
from ampdoctor.probes.nonfinite import dtype_name, kind_of
from ampdoctor.probes.ops import Ran, Site
from ampdoctor.probes.tensor_memory import NONE, ByMemory, OriginIds, storage_key

# -- finite ops before an origin, modules that carry its values on, and what it affects --

FEEDERS = 5  # finite ops before an origin that are kept, nearest last: a few show how an overflow grew
MOST_CARRIERS = 1000  # places of a step that are measured as carriers; each costs some reductions
WRITTEN = (FILLS | ROOTS) - {"where"}  # kernels without inputs: constants, and the 1 from which a backward starts
_PHASES: dict[str, Phase] = {"loss": "loss", "raised": "loss", "grad": "backward", "buffer": "forward"}


@dataclass(frozen=True, slots=True)
class _Fed:
    """A finite result: the op that made it, and the largest of this op's inputs."""

    order: int
    site: Site
    dtype: str
    shape: tuple[int, ...]
    amax: float
    largest: _Fed | None


@dataclass(slots=True)
class _Carrier:
    """The ops of one module call that carry the same origins; `shown` is the first that does not only move values."""

    shown: PathOp
    origins: OriginIds
    moves: bool
    orders: list[int] = field(default_factory=list)


class Ways:
    """Keeps a few numbers, and no tensor, for each op of a traced step."""

    def __init__(self) -> None:
        self.clear(0)

    def clear(self, step: int) -> None:
        self._step = step
        self._fed: ByMemory[_Fed] = ByMemory()
        self._written: ByMemory[int] = ByMemory()
        self._carriers: dict[tuple[Any, ...], _Carrier] = {}
        self._affected: dict[tuple[int, str], PathOp] = {}
        self._arrived: set[int] = set()
        self._backwards: list[int] = []
        self._in_backward = False

    def pass_finite(self, ran: Ran, order: int) -> None:
        """Note an op without a non-finite result; `order` is its position in the step."""
        self._note_phase(ran.site, order)
        made = list(_own_memory(ran))
        if not made:
            return  # a view: its memory has the same maker
        fed = self._largest(ran.call.reads)
        for tensor in made:
            key = storage_key(tensor)
            if ran.kernel in WRITTEN or not ran.call.reads:
                self._fed.pop(key, None)
            elif ran.kernel in MOVES and fed is not None:
                self._fed[key] = fed
            else:
                shape, amax = tuple(tensor.shape), amax_of(tensor)
                self._fed[key] = _Fed(order, ran.site, dtype_name(tensor), shape, amax, fed)

    def carry(self, ran: Ran, poisoned: Sequence[torch.Tensor], origins: OriginIds, order: int, *, born: bool) -> None:
        """Note an op with non-finite results (`poisoned`) that descend from `origins`; if `born`, it is the origin."""
        site = ran.site
        self._note_phase(site, order)
        for tensor in poisoned:
            key = storage_key(tensor)
            self._fed.pop(key, None)
            self._written[key] = order
        if born or origins <= self._arrived:
            return  # everything after the first affected value is a consequence of it
        place = (origins, site.phase, site.module, site.call, site.micro_batch)
        views = next(_own_memory(ran), None) is None
        moves = views or ran.kernel in MOVES
        known = self._carriers.get(place)
        if (known is None and len(self._carriers) >= MOST_CARRIERS) or (known is not None and views):
            return  # a view is shown only for a module that does nothing else, and is not counted
        if known is None or (known.moves and not moves):
            passage = passage_of(poisoned[0], order, site.where(self._step, kind_of(poisoned)), ran.call.before)
            orders = known.orders if known is not None else []
            self._carriers[place] = known = _Carrier(passage, origins, moves, orders)
        known.orders.append(order)

    def arrive(self, target: str, value: torch.Tensor | float | None, origins: OriginIds, order: int) -> None:
        """Note that a target ("loss", "grad:NAME", ...) is non-finite after `order` ops; `value` None: an exception."""
        kind, _, name = target.partition(":")
        new = [origin for origin in origins if (origin, kind) not in self._affected]
        self._arrived |= origins
        if not new:
            return
        if isinstance(value, torch.Tensor):
            order = self._written.get(storage_key(value), order)
        owner = name.partition(":")[0]
        where = Where(
            step=self._step,
            phase=_PHASES.get(kind, "optimizer"),
            module=owner.rpartition(".")[0],
            op=target,
            nonfinite="none" if value is None else kind_of([torch.as_tensor(value)]),
            tensor=owner or None,
        )
        passage = passage_of(value, order, where)
        self._affected.update({(origin, kind): passage for origin in new})

    def before(self, reads: Iterable[torch.Tensor]) -> tuple[PathOp, ...]:
        """The finite ops behind an op's inputs, the nearest last: each time the op that made the largest input."""
        nodes: list[PathOp] = []
        fed, place = self._largest(reads), None
        while fed is not None and len(nodes) < FEEDERS:
            site = fed.site
            if place != (site.phase, site.module, site.call, site.micro_batch):
                place = (site.phase, site.module, site.call, site.micro_batch)
                nodes.append(
                    PathOp(
                        order=fed.order,
                        where=site.where(self._step, "none"),
                        dtype=fed.dtype,
                        shape=fed.shape,
                        input_amax=fed.largest.amax if fed.largest is not None else None,
                        amax=fed.amax,
                    )
                )
            fed = fed.largest
        return tuple(reversed(nodes))

    def way(self, origin: int, order: int, before: tuple[PathOp, ...]) -> PropagationPath:
        """The path of origin number `origin`, at position `order`; `before` is the result of `before` at that time."""
        # the returned loss is often a sum made at the end of the step; the loss itself existed before its backward
        loss = next((start - 1 for start in self._backwards if start > order), None)
        affected = sorted(
            (
                replace(harm, order=loss) if kind == "loss" and loss is not None else harm
                for (index, kind), harm in self._affected.items()
                if index == origin
            ),
            key=lambda passage: (passage.order, passage.where.op != "loss"),  # a loss comes before its gradients
        )
        end = affected[0].order if affected else math.inf
        shown: dict[tuple[Any, ...], PathOp] = {}
        ops = 0
        for place, carrier in self._carriers.items():
            passed = sum(order <= end for order in carrier.orders) if origin in carrier.origins else 0
            if passed:
                shown.setdefault(place[1:], carrier.shown)
                ops += passed
        carriers = tuple(sorted(shown.values(), key=lambda passage: passage.order))
        return PropagationPath(before=before, carriers=carriers, affected=tuple(affected), omitted=ops - len(carriers))

    def _note_phase(self, site: Site, order: int) -> None:
        backward = site.phase == "backward"
        if backward and not self._in_backward:
            self._backwards.append(order)
        self._in_backward = backward

    def _largest(self, reads: Iterable[torch.Tensor]) -> _Fed | None:
        known = [fed for t in reads if (fed := self._fed.get(storage_key(t))) is not None]
        return max(known, key=lambda fed: (fed.amax, fed.order), default=None)


def passage_of(
    value: torch.Tensor | float | None, order: int, where: Where, reads: Sequence[torch.Tensor] = ()
) -> PathOp:
    """A `PathOp` with the numbers of `value` (a tensor, a number, or None) and of the op's inputs."""
    inputs = [amax_of(tensor) for tensor in reads if is_watched(tensor)]
    input_amax = max(inputs, default=None)
    if isinstance(value, torch.Tensor):
        seen = describe(value)
        return PathOp(
            order=order,
            where=where,
            dtype=seen.dtype,
            shape=seen.shape,
            input_amax=input_amax,
            amax=seen.finite_amax or 0.0,
            nans=seen.nans,
            infs=seen.pos_infs + seen.neg_infs,
        )
    nan, inf = (value is not None and math.isnan(value)), (value is not None and math.isinf(value))
    return PathOp(order=order, where=where, input_amax=input_amax, nans=int(nan), infs=int(inf))


def amax_of(tensor: torch.Tensor) -> float:
    """Largest finite magnitude, 0.0 where there is none: one reduction for a finite tensor."""
    return describe(tensor).finite_amax or 0.0


def _own_memory(ran: Ran) -> Iterator[torch.Tensor]:
    """The results that are no views of the op's inputs."""
    read = set() if ran.call.in_place else {storage_key(t) for t in tensors_in([*ran.call.args, ran.call.kwargs])}
    return (tensor for tensor in ran.results if storage_key(tensor) not in read)


# -- non-finite values that the step's Python code reads --


class Readings:
    """The origins behind the non-finite values that the step's code read last, as a loop does that checks itself."""

    def __init__(self) -> None:
        self.number: OriginIds = NONE  # of the last value that became a Python number
        self.asked: OriginIds = NONE  # of the last value that became a number, was compared, or that an op refused

    def note(self, ran: Ran, origins: Callable[[Sequence[torch.Tensor], Site], OriginIds]) -> None:
        if not ran.bad:
            return
        if ran.kernel == "_local_scalar_dense":
            self.number = self.asked = origins(ran.bad, ran.site)
        elif not ran.results:
            self.asked = origins(ran.bad, ran.site)

    def refused(
        self, bad: Sequence[torch.Tensor], site: Site, origins: Callable[[Sequence[torch.Tensor], Site], OriginIds]
    ) -> None:
        """Note an op that raised an exception; `bad` are its non-finite inputs."""
        if bad:
            self.asked = origins(bad, site)
