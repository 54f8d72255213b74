"""Values that a format lost: which zeros and ones are another number in float64, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ampdoctor.hooks.torch_internals import of_transform
from ampdoctor.probes.modules import tensors_in
from ampdoctor.probes.nonfinite import dense
from ampdoctor.probes.ops import CONSTANTS, Ran, Site, Split
from ampdoctor.probes.recompute import NO_RESULT, aligned, doubled
from ampdoctor.probes.tensor_memory import ByMemory, storage_key

# -- lost elements: 0 or 1 here, and another number in float64 from the same inputs --

KEPT = 2**12  # lost elements that one record keeps, the first ones: one is enough to name the op


@dataclass(frozen=True, slots=True)
class Producer:
    """What a value came from."""

    made_by: str  # as in `ampdoctor.evidence.trace.Operand`
    site: Site | None  # where the op ran; None for a value from before the step
    dtype: torch.dtype
    fraction: float = 0.0  # share of the result's elements that were lost
    amax: float = 0.0  # largest float64 magnitude among the lost elements; of elements rounded to one, the smallest


@dataclass(frozen=True, slots=True)
class RoundedAway:
    """Elements of a storage that are 0 or 1 here and something else in float64."""

    maker: Producer
    places: torch.Tensor  # positions in the storage, in elements
    here: torch.Tensor  # 0, 1 or -1
    meant: torch.Tensor  # in float64


def record_of(
    result: torch.Tensor, at: torch.Tensor, here: torch.Tensor, meant: torch.Tensor, maker: Producer
) -> RoundedAway:
    """The record of lost elements; `at` are their positions as if `result` were contiguous."""
    left = at[:KEPT]
    places = torch.zeros_like(left).add_(result.storage_offset())
    for length, stride in zip(reversed(result.shape), reversed(result.stride()), strict=True):
        places += left % length * stride
        left = left // length
    return RoundedAway(maker, places, here[:KEPT], meant[:KEPT])


def outside(lost: RoundedAway, tensor: torch.Tensor) -> RoundedAway | None:
    """The part of a record that remains after the tensor has been written."""
    size = int(tensor.untyped_storage().nbytes()) // tensor.element_size()
    if tensor.numel() >= size and tensor.is_contiguous():
        return None
    written = torch.zeros((size,), dtype=torch.bool, device=tensor.device)
    written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    keep = lost.places < size
    keep &= ~written[lost.places.clamp(max=size - 1)]
    if not bool(keep.any()):
        return None
    return RoundedAway(lost.maker, lost.places[keep], lost.here[keep], lost.meant[keep])


def loser(ran: Ran, result: torch.Tensor, meant: torch.Tensor, *, zero: bool) -> Producer:
    """The op as the maker of lost elements (`meant`, in float64): rounded to one, flushed, or a flushed epsilon."""
    values = meant.abs()
    share = len(meant) / result.numel()
    if not zero:
        # the value farthest from 1 is the most telling
        return Producer("rounded_to_one", ran.site, result.dtype, share, float(values.min()))
    numbers = [abs(number) for number, rounded in lost_numbers(ran.call, result.dtype, ran.kernel) if not rounded]
    epsilon = any(bool((values == number).any()) for number in numbers)
    return Producer("flushed_epsilon" if epsilon else "flushed", ran.site, result.dtype, share, float(values.max()))


LITERALS = {"binary_cross_entropy_backward": (1e-12,)}
"""Numbers in the code of torch's kernels: `EPSILON` of aten/src/ATen/native/Loss.cpp and cuda/Loss.cu."""


def lost_numbers(call: Split, dtype: torch.dtype, kernel: str) -> Iterator[tuple[float, float]]:
    """Numbers of a call (or in its kernel's code) that the format rounds to 0, 1 or -1, each with the rounded value."""
    for item in (*call.args, *call.kwargs.values(), LITERALS.get(kernel, ())):
        for value in item if isinstance(item, list | tuple) else (item,):
            number = float(value.detach()) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(number, float) and math.isfinite(number) and number:
                rounded = float(torch.tensor(number, dtype=torch.float64).to(dtype))
                if rounded in (0.0, 1.0, -1.0) and rounded != number:
                    yield number, rounded


# -- where exact zeros and ones come from: lost by a format, computed, written by the user, or given with the step --
#
# Each storage has one small record, never a tensor: a value that is 0 or 1 here and another number in float64 from the
# same inputs is *lost*, and its float64 value is recorded by its position in the storage. An op that reads lost values
# is run again on the float64 values. So the loss is inherited where it still has an effect, through views, copies and
# casts, across modules and from the forward into the backward.

FILLS = CONSTANTS | {
    *("zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones"),
    "_efficientzerotensor",
}
"""Kernels whose zeros and ones the user wrote."""

ROOTS = frozenset({"ones_like", "ones", "full_like", "full"})  # kernels that make a backward's first gradient
MOVES = frozenset(
    {"clone", "copy_", "_to_copy", "_unsafe_view", "cat", "stack", "index", "index_select", "gather", "flip", "roll"}
)  # kernels that only move values: the maker of the input counts as the maker of the result


class Provenance:
    """Records, by storage, where the values of a step come from; `name_of` is that of `Belongings`."""

    def __init__(self, name_of: Callable[[torch.Tensor], str | None]) -> None:
        self._name_of = name_of
        self._lost: ByMemory[list[RoundedAway]] = ByMemory()
        self._zeros: ByMemory[Producer] = ByMemory()
        self._makers: ByMemory[Producer] = ByMemory()
        self._gradients: ByMemory[None] = ByMemory()

    def clear(self) -> None:
        for known in (self._lost, self._zeros, self._makers, self._gradients):
            known.clear()

    def forget(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        for known in (self._lost, self._zeros, self._makers, self._gradients):
            known.pop(key, None)

    def losses(self, tensor: torch.Tensor) -> tuple[RoundedAway, ...]:
        return tuple(self._lost.get(storage_key(tensor), ()))

    def meant(self, tensor: torch.Tensor, before: torch.Tensor, losses: tuple[RoundedAway, ...]) -> torch.Tensor | None:
        """The tensor (values `before`) in float64 with its lost elements restored; None where it shows none of them."""
        if tensor.layout is not torch.strided or tensor.is_complex() or tensor.numel() == 0:
            return None
        size = int(tensor.untyped_storage().nbytes()) // tensor.element_size()
        meant = torch.full((size,), torch.nan, dtype=torch.float64, device=tensor.device)
        here = torch.zeros((size,), dtype=torch.float64, device=tensor.device)
        for lost in losses:
            fits = lost.places < size
            meant[lost.places[fits]] = lost.meant[fits]
            here[lost.places[fits]] = lost.here[fits]
        seen = [t.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()) for t in (meant, here)]
        real = doubled(before)
        put_back = ~torch.isnan(seen[0]) & (real == seen[1])
        return torch.where(put_back, seen[0], real) if bool(put_back.any()) else None

    def zeros(self, tensor: torch.Tensor) -> Producer | None:
        """Where a tensor's exact zeros come from, if known."""
        key = storage_key(tensor)
        known = self._zeros.get(key)
        if known is not None:
            return known
        return self._brought(tensor) or self._makers.get(key)

    def maker(self, tensor: torch.Tensor) -> Producer | None:
        """The op that wrote a tensor's storage last, or the name under which it came with the step."""
        return self._makers.get(storage_key(tensor)) or self._brought(tensor)

    def _brought(self, tensor: torch.Tensor) -> Producer | None:
        name = self._name_of(tensor)
        if name is None and storage_key(tensor) in self._gradients:
            name = "gradient"
        return Producer(name, None, tensor.dtype) if name is not None else None

    def note(self, ran: Ran) -> None:
        """Record what an op made, and where its zeros and ones come from; `losses` must still describe its inputs."""
        read = {storage_key(t) for t in tensors_in([*ran.call.args, *ran.call.kwargs.values()])}
        made = [t for t in self._made(ran) if ran.call.in_place or storage_key(t) not in read]
        if not made:
            return  # a view: its memory keeps its records
        if self._follows_a_gradient(ran):
            for tensor in made:
                self.forget(tensor)
                self._gradients[storage_key(tensor)] = None
            return
        special = {id(t): values for t in made if (values := _special(t))}
        lost = self._losses_of(ran, special) if special else {}
        zeros = self._zeros_of(ran, [t for t in made if 0 in special.get(id(t), ())])
        for tensor in made:
            key = storage_key(tensor)
            self._gradients.pop(key, None)
            if ran.kernel in ROOTS:
                self._gradients[key] = None
            self._keep(tensor, lost.get(id(tensor), []))
            self._makers[key] = self._maker_of(ran, tensor)
            if id(tensor) in zeros:
                self._zeros[key] = zeros[id(tensor)]
            else:
                self._zeros.pop(key, None)

    def _maker_of(self, ran: Ran, result: torch.Tensor) -> Producer:
        if ran.kernel in MOVES:
            moved = [t for t in tensors_in([*ran.call.args, *ran.call.kwargs.values()]) if t is not result]
            maker = self.maker(moved[0]) if moved else None
            if maker is not None:
                return maker
        return Producer("constant" if ran.kernel in FILLS else "computed", ran.site, result.dtype)

    def _made(self, ran: Ran) -> list[torch.Tensor]:
        """Results of a dtype that can be an operand, with memory of their own."""
        floats = [t for t in ran.results if not t.is_complex()]
        others = [t for t in tensors_in(ran.returned) if not (t.is_floating_point() or t.is_complex())]
        return [t for t in (*floats, *others) if is_plain(t)]

    def _follows_a_gradient(self, ran: Ran) -> bool:
        """Whether a backward's op reads a gradient: full of zeros, among which no operand is sought."""
        if ran.site.phase != "backward" or ran.site.line is not None:
            return False  # the user's own backward code is treated like a forward
        if ran.kernel in FILLS and ran.kernel != "where":
            return True
        return any(storage_key(t) in self._gradients for t in tensors_in([*ran.call.args, *ran.call.kwargs.values()]))

    def _losses_of(self, ran: Ran, special: dict[int, tuple[int, ...]]) -> dict[int, list[RoundedAway]]:
        """By `id` of a result: the elements that the op itself loses, and those that it inherits."""
        call = ran.call
        candidates = [i for i, t in enumerate(ran.results) if id(t) in special and t.dtype != torch.float64]
        inherited = self.inherited(call)
        if not candidates or not call.repeatable or (ran.kernel in FILLS and not inherited):
            return {}
        put_back = call.substituted(lambda t: inherited[id(t)][0] if id(t) in inherited else None)
        own = aligned(ran, call)
        meant = (aligned(ran, put_back) if inherited else []) or own
        found: dict[int, list[RoundedAway]] = {}
        for position in candidates if own else ():
            result, records = ran.results[position], found.setdefault(id(ran.results[position]), [])
            for value in special[id(result)]:
                at = (dense(result).abs() == value).reshape(-1).nonzero()[:, 0]
                alone, together = (wide[position].reshape(-1)[at] for wide in (own, meant))
                real = doubled(dense(result).reshape(-1)[at])
                here = (alone != real) & torch.isfinite(alone)
                there = ~here & (together != real) & torch.isfinite(together)
                if bool(here.any()):
                    maker = loser(ran, result, alone[here], zero=not value)
                    records.append(record_of(result, at[here], real[here], alone[here], maker))
                if bool(there.any()):
                    ancestor = next(iter(inherited.values()))[1]
                    records.append(record_of(result, at[there], real[there], together[there], ancestor))
        return found

    def inherited(self, call: Split) -> dict[int, tuple[torch.Tensor, Producer]]:
        """By `id` of an input: its values with lost elements restored, and the op that lost most of them."""
        found: dict[int, tuple[torch.Tensor, Producer]] = {}
        if not self._lost:
            return found
        for tensor, before in zip(call.reads, call.before, strict=True):
            losses = self.losses(tensor)
            meant = self.meant(tensor, before, losses) if losses else None
            if meant is not None:
                found[id(tensor)] = meant, max(losses, key=lambda lost: len(lost.places)).maker
        return found

    def _zeros_of(self, ran: Ran, results: list[torch.Tensor]) -> dict[int, Producer]:
        """By `id` of a result that holds zeros: the maker of the input whose zeros cause them, else the op itself."""
        if not results:
            return {}
        found: dict[int, Producer] = {}
        for tensor in results:
            name = self._name_of(tensor) if ran.call.in_place else None
            by = "constant" if ran.kernel in FILLS else "computed"
            found[id(tensor)] = Producer(name or by, None if name else ran.site, tensor.dtype)
        if ran.kernel not in FILLS or ran.kernel == "where":
            for tensor, before in self._zero_inputs(ran.call):
                maker = self.zeros(tensor)
                if maker is not None:
                    for result in _moved_by(ran, results, tensor, before):
                        if found[id(result)].made_by in ("computed", "constant"):
                            found[id(result)] = maker
                    if all(found[id(r)].site is not ran.site for r in results):
                        break
        return found

    def _zero_inputs(self, call: Split) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs that hold zeros, with the values they had."""
        known = {id(b): r for b, r in zip(call.before, call.reads, strict=True)}
        for item in tensors_in([*call.args, *call.kwargs.values()]):
            tensor = known.get(id(item), item)
            key = storage_key(tensor)
            if (key in self._zeros or key not in self._makers) and is_plain(item) and bool((dense(item) == 0).any()):
                yield tensor, item

    def _keep(self, tensor: torch.Tensor, records: list[RoundedAway]) -> None:
        """Replace the storage's records where the tensor lies."""
        key = storage_key(tensor)
        left = [lost for old in self._lost.pop(key, ()) if (lost := outside(old, tensor)) is not None]
        if left or records:
            self._lost[key] = [*left, *records]


_NO_KERNELS = (torch.uint16, torch.uint32, torch.uint64)  # formats without most kernels: attention's seeds and offsets


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read here: dense, with memory, not inside a `torch.func` transform."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor._is_zerotensor() or tensor.is_complex():
        return False
    if tensor.dtype in _NO_KERNELS:
        return False
    return tensor.numel() > 0 and not of_transform(tensor)


def _special(tensor: torch.Tensor) -> tuple[int, ...]:
    """0 if it holds an exact zero, 1 if its largest magnitude is exactly 1, as of a rounded probability or cosine."""
    values = dense(tensor.detach())
    low, high = (float(end) for end in (torch.aminmax(values) if tensor.dtype is not torch.bool else (values.all(), 2)))
    if math.isnan(low):
        return ()
    zero = low == 0.0 or high == 0.0 or (low < 0.0 < high and int(torch.count_nonzero(values)) < values.numel())
    one = max(-low, high) == 1.0 and tensor.is_floating_point()
    return (0,) * zero + (1,) * one


def _moved_by(
    ran: Ran, results: list[torch.Tensor], tensor: torch.Tensor, before: torch.Tensor
) -> Iterator[torch.Tensor]:
    """The results whose zeros vanish once the input's zeros are replaced by ones."""
    instead = torch.where(before == 0, torch.ones_like(before), before)
    if not ran.call.repeatable or torch.Tag.nondeterministic_seeded in getattr(ran.func, "tags", ()):
        return
    call = ran.call.substituted(lambda t: instead if t is tensor else None)
    others = aligned(ran, call) if ran.results else _as_it_is(ran, call)  # integers and booleans have no wider dtype
    for result in results:
        position = next((i for i, t in enumerate(ran.results) if t is result), 0)
        same = position < len(others) and others[position].shape == result.shape
        if same and bool(((others[position] != 0) & (dense(result) == 0)).any()):
            yield result


def _as_it_is(ran: Ran, call: Split) -> list[torch.Tensor]:
    try:
        with torch.no_grad():
            return list(tensors_in(ran.func(*call.args, **call.kwargs)))
    except NO_RESULT:
        return []
