"""Which memory a tensor has: which origins it descends from, and what it was when the step began."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef

from ampdoctor.evidence.location import Phase, Where
from ampdoctor.evidence.trace import Origin
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.numerics.tensors import is_plain, parts_of
from ampdoctor.probes.nonfinite import dense, is_mask, is_nonfinite, kind_of, state_tensors
from ampdoctor.probes.ops import Site
from ampdoctor.probes.recompute import doubled

# -- which origins a non-finite tensor descends from, and its values without them --

OriginIds = frozenset[int]
NONE: OriginIds = frozenset()
Memory: TypeAlias = StorageWeakRef | WeakIdRef  # weak; unlike an address, never matches a later storage there
FEWEST = 64  # number of entries from which on a map removes those of freed memory
_V = TypeVar("_V")


def storage_key(tensor: torch.Tensor) -> Memory:
    """Identity of a tensor's storage, shared by its views; an address alone is reused after the storage is freed."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except RuntimeError:  # sparse layouts have no storage of their own
        return WeakIdRef(tensor)


class ByMemory(dict[Memory, _V]):
    """A map by storage; entries of freed storages are removed whenever the map has doubled."""

    def __init__(self) -> None:
        super().__init__()
        self._most = FEWEST

    def __setitem__(self, key: Memory, value: _V) -> None:
        if len(self) >= self._most and key not in self:
            for known in list(self):
                if known.expired() if isinstance(known, StorageWeakRef) else known() is None:
                    del self[known]
            self._most = max(FEWEST, 2 * len(self))
        super().__setitem__(key, value)


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identity of a view among those of the same memory."""
    try:
        return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    except RuntimeError:
        return (tuple(tensor.shape),)


class Taint:
    """The origins behind non-finite values, by storage; and the float64 values without these origins, by view."""

    def __init__(self) -> None:
        self._origins: ByMemory[OriginIds] = ByMemory()
        self._shadows: ByMemory[dict[tuple[Any, ...], torch.Tensor]] = ByMemory()

    def clear(self) -> None:
        self._origins.clear()
        self._shadows.clear()

    def origins(self, tensor: torch.Tensor) -> OriginIds:
        """The origins that a tensor's memory (for a subclass, that of its parts) descends from."""
        if is_plain(tensor):
            return self._origins.get(storage_key(tensor), NONE)
        return union(self._origins.get(storage_key(part), NONE) for part in (parts_of(tensor) or [tensor]))

    def mark(self, tensor: torch.Tensor, origins: OriginIds, *, added: bool) -> None:
        """Note a non-finite result; with `added`, the op wrote into memory that may hold values of earlier origins."""
        key = storage_key(tensor)
        self._origins[key] = origins | self._origins.get(key, NONE) if added else origins
        self._lift_shadow(tensor)  # `cast_shadow` follows where these values have one

    def clean(self, tensor: torch.Tensor) -> None:
        """Note a finite result: if it fills its memory, nothing non-finite is left there."""
        key = storage_key(tensor)
        if key in self._origins and covers(tensor):
            del self._origins[key]
        self._lift_shadow(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        self._origins.pop(storage_key(tensor), None)

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The float64 values that the tensor would have if the origins had been computed in float64."""
        if not self._shadows:
            return None
        return self._shadows.get(storage_key(tensor), {}).get(view_key(tensor))

    def cast_shadow(self, tensor: torch.Tensor, reference: torch.Tensor) -> None:
        """Store `reference` (float64, computed without the origins) where it is finite and `tensor` is not."""
        real = doubled(tensor)
        fine = torch.isfinite(real)
        if bool((~fine & torch.isfinite(reference)).any()):
            key = storage_key(tensor)
            self._shadows[key] = {**self._shadows.get(key, {}), view_key(tensor): torch.where(fine, real, reference)}
        else:
            self._lift_shadow(tensor)

    def _lift_shadow(self, tensor: torch.Tensor) -> None:
        """Drop the float64 values of a view that has been written."""
        if self._shadows:
            self._shadows.get(storage_key(tensor), {}).pop(view_key(tensor), None)


def union(origins: Iterable[OriginIds]) -> OriginIds:
    """The origins of several tensors."""
    return frozenset().union(*origins)


def covers(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory; an expanded dimension repeats elements and fills nothing."""
    try:
        distinct = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        return distinct * tensor.element_size() >= int(tensor.untyped_storage().nbytes())
    except RuntimeError:  # sparse layouts: the key is the tensor's own
        return True


# -- tensors that came with the step --

_STATE: dict[str, Origin] = {"param": "param", "buffer": "buffer", "optimizer_state": "optimizer_state", "grad": "grad"}


@dataclass(slots=True)
class Belongings:
    """The state and the batch of one step, by storage."""

    run: ObservedRun
    step: int
    nonfinite: tuple[torch.Tensor, ...] = ()  # state that was non-finite before the step
    masks: frozenset[str] = frozenset()  # names of buffers that hold infinities on purpose
    _owners: dict[Memory, tuple[str, str]] = field(default_factory=dict)
    _batch: dict[Memory, str] = field(default_factory=dict)
    _views: dict[Memory, list[tuple[tuple[int, int], tuple[str, str]]]] = field(default_factory=dict)
    _gradients: dict[Memory, str] | None = None
    _moments: int = 0

    def __post_init__(self) -> None:
        state = list(state_tensors(self.run))
        before = [(kind, name, t) for kind, name, t in state if is_nonfinite(t)]
        self.nonfinite = tuple(t for _, _, t in before)
        self.masks = frozenset(name for kind, name, t in before if kind == "buffer" and is_mask(t))
        self._moments = self._count_moments()
        self._owners = {storage_key(t): (kind, name) for kind, name, t in state}
        views: dict[Memory, list[tuple[tuple[int, int], tuple[str, str]]]] = {}  # flat buffers, bucket views
        for kind, name, tensor in state:
            views.setdefault(storage_key(tensor), []).append((_span(tensor), (kind, name)))
        self._views = {key: parts for key, parts in views.items() if len({span for span, _ in parts}) > 1}
        names = self.run.parameter_names()
        for parameter in self.run.model.parameters():
            if parameter.grad is not None and is_nonfinite(parameter.grad):  # of an earlier step, and not cleared
                self._owners[storage_key(parameter.grad)] = ("grad", names[id(parameter)])
        self._take_batch()

    def _owner_of(self, tensor: torch.Tensor) -> tuple[str, str]:
        """(kind, name) of the state in a tensor's memory: the part that overlaps it, a non-finite one first."""
        key = storage_key(tensor)
        views = self._views.get(key)
        if views is None:
            return self._owner(key)
        begin, end = _span(tensor)
        sick = {(storage_key(t), _span(t)) for t in self.nonfinite}
        shown = [(span, owner) for span, owner in views if span[0] < end and begin < span[1]]
        shown.sort(key=lambda one: ((key, one[0]) not in sick, one[0] != (begin, end)))
        return shown[0][1] if shown else self._owner(key)

    def _take_batch(self) -> None:
        for path, given in self.run.current_tensors():
            self._batch.setdefault(storage_key(given), path)

    def _path_in_batch(self, key: Memory) -> str | None:
        """The path of a tensor of the batch, else None; looks again, as a step may draw more while it runs."""
        if key not in self._batch:
            self._take_batch()
        return self._batch.get(key)

    def first_in_batch(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The index of the first value that is not finite in the batch's tensor of this memory; () where unknown."""
        key = storage_key(tensor)
        given = next((t for _, t in self.run.current_tensors() if storage_key(t) == key), None)
        if given is None or given.layout is not torch.strided or not given.is_floating_point():
            return ()
        bad = torch.isfinite(dense(given).detach()).logical_not_().flatten()
        at = torch.unravel_index(bad.to(torch.uint8).argmax(), given.shape) if bad.any() else ()
        return tuple(map(int, at))

    def entering(self, site: Site) -> None:
        """Note that an op is about to run: gradients have names only in the optimizer's and scaler's phases."""
        if site.phase not in ("optimizer", "scaler"):
            self._gradients = None
        elif self._gradients is None:
            names = self.run.parameter_names()
            self._gradients = {
                storage_key(p.grad): names[id(p)] for p in self.run.model.parameters() if p.grad is not None
            }

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """What a tensor came as: "data", "param:NAME", "optimizer_state:NAME:KEY", "grad:NAME"; else None."""
        key = storage_key(tensor)
        if self._path_in_batch(key) is not None:
            return "data"
        kind, name = self._owner_of(tensor)
        if kind:
            return f"{kind}:{name}"
        gradient = (self._gradients or {}).get(key)
        return f"grad:{gradient}" if gradient is not None else None

    def label(self, tensor: torch.Tensor) -> str | None:
        """The name of an input for the report: "batch.x", "param:fc.weight"; None where it has none."""
        key = storage_key(tensor)
        kind, name = self._owner_of(tensor)
        if kind:
            return f"{kind}:{name}"
        path = self._path_in_batch(key)
        if path is None:
            return None
        return f"batch.{path}" if path else "batch"

    def parameter_of(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """The parameter that an optimizer's or a scaler's op works on."""
        known = list(tensors)
        for tensor in known:
            kind, name = self._owner_of(tensor)
            if kind:
                return name.partition(":")[0]
        gradients = self._gradients or {}
        return next((gradients[key] for t in known if (key := storage_key(t)) in gradients), None)

    def origin_of(self, tensor: torch.Tensor, site: Site) -> tuple[Where, Origin]:
        """Where a non-finite input came from that no op of the step made."""
        key = storage_key(tensor)
        kind, name = self._owner_of(tensor)
        nonfinite = kind_of([tensor])
        if kind == "buffer" and name in self.masks:
            return site.where(self.step, nonfinite, name), "constant"
        if kind in _STATE:
            parameter, _, entry = name.partition(":")
            module, _, leaf = parameter.rpartition(".")
            op = {"optimizer_state": f"optimizer_state:{entry}", "grad": "zero_grad"}.get(kind, f"state:{leaf}")
            phase: Phase = "optimizer" if kind == "grad" else "checkpoint"
            where = Where(step=self.step, phase=phase, module=module, op=op, nonfinite=nonfinite, tensor=parameter)
            return where, _STATE[kind]
        path = self._path_in_batch(key)
        if path is not None:
            where = Where(step=self.step, phase="data", op="data", nonfinite=nonfinite, tensor=path)
            return replace(where, micro_batch=site.micro_batch), "data"
        return site.where(self.step, nonfinite), "constant"

    def _owner(self, key: Memory) -> tuple[str, str]:
        if key not in self._owners and self._gradients is not None and self._moments != self._count_moments():
            # an optimizer makes its moments in its first step
            self._moments = self._count_moments()
            for kind, name, tensor in state_tensors(self.run):
                self._owners.setdefault(storage_key(tensor), (kind, name))
        return self._owners.get(key, ("", ""))

    def _count_moments(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.run.optimizers.values())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    begin = int(tensor.storage_offset()) * tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum(int(size - 1) * int(stride) for size, stride in steps)
    return begin, begin + (1 + last) * tensor.element_size()
