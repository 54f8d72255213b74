"""The forward twice, op by op: as it runs, and in fp32 on what its inputs would be in fp32, from the batch on.

Rounding moves a result by a few units in the last place, and most ops hand such an error on as large as they got it.
What is sought is an op that makes a large one of it: an index that is another one, the sine of a large angle, the small
difference of large sums. From there the way back leads to the op whose own rounding most of that error came from.

The idea of a wide shadow beside each value, with the error split into what an op inherits and what it adds, is that of
FpDebug (Benz, Hildebrandt, Hack: A dynamic program analysis to find floating-point accuracy problems, PLDI 2012).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ampdoctor.evidence.trace import Amplified
from ampdoctor.hooks.torch_internals import in_backward, no_modes
from ampdoctor.precision.dtype_overrides import wide_numbers
from ampdoctor.probes.modules import takes_apart, tensors_in
from ampdoctor.probes.ops import UNINITIALISED, Site, Sites, kernel_name, reads_layout
from ampdoctor.probes.recompute import NO_RESULT, widened
from ampdoctor.probes.tensor_memory import ByMemory, storage_key, view_key

if TYPE_CHECKING:
    from ampdoctor.evidence.location import Source, Where
    from ampdoctor.hooks.interfaces import Watched

AMPLIFIES = 8.0
"""Factor by which an op has to enlarge a relative error. Sums, products and activations leave it as it is or make it
smaller; a softmax over logits of +-10 enlarges it ten times, but a rounding of 2^-9 to less than `SEEN`."""
SEEN = 1.0 / 32
"""Relative L2 error of a result from which it is recorded: eight roundings to bf16 that all add up."""

ALIKE = 0.25
"""Share of the largest error among an op's inputs from which another input counts as well."""
MOST_SOURCES = 4
"""Sources that are named: an angle has two, the position and the rate."""
MOST_FOLLOWED = 64
"""Values that are followed back; what goes back farther is the rounding of a whole network."""


_CONTRACTIONS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution"})
"""Kernels that sum up products; attention's (`_scaled_dot_product_...`) and recurrent layers' go by their names."""


@dataclass(frozen=True, slots=True)
class _Made:
    """How a value came by its error.

    Attributes:
        order: Position of its op.
        site: Where the op ran.
        dtype: Format of the result.
        error: Relative L2 error of the result against its twin.
        rounding: The part of it that the op adds.
        carried: The part of it that its inputs bring.
        contracts: The op sums up products, as those of matrices do.
        inputs: What they came from.
    """

    order: int
    site: Site
    dtype: torch.dtype
    error: float
    rounding: float
    carried: float
    contracts: bool
    inputs: tuple[_Made, ...]


@dataclass(frozen=True, slots=True)
class _Twin:
    """What a tensor would hold in fp32, and how it came by its error."""

    value: torch.Tensor
    made: _Made


class WideForwardProbe(TorchDispatchMode):
    """Watches the forward of the steps that run while it is attached; what random ops draw counts as exact.

    Args:
        right: Places whose results the step gets as fp32 makes them, rounded to their own format.

    Attributes:
        amplified: Of the step that was finished last, in the order of its ops.
    """

    def __init__(self, right: Collection[Where] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self._right = frozenset(map(_place, right))
        self.amplified: tuple[Amplified, ...] = ()
        self._sites = Sites()
        self._twins: ByMemory[dict[tuple[Any, ...], _Twin]] = ByMemory()
        self._found: list[Amplified] = []
        self._ops = 0
        self._step = 0

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Module hooks are in place inside."""
        with self._sites.attach(run):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """The dispatch mode and the function mode are on."""
        self._clear()
        self._step = step
        with self, self._sites.functions.watching(), _MadeOfNumbers(self):
            yield

    def made(self, result: torch.Tensor, wide: torch.Tensor) -> None:
        """The step's code has made a tensor of numbers in a half format, which would have held more in fp32."""
        site = self._sites.of("tensor")
        self._ops += 1
        error, rounding, carried = _errors(result, wide, wide)
        if error > 0.0:
            made = _Made(self._ops, site, result.dtype, error, rounding, carried, contracts=False, inputs=())
            self._twins.setdefault(storage_key(result), {})[view_key(result)] = _Twin(wide, made)

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the probe's seam
        """Hand out what was seen."""
        self.amplified = tuple(self._found)
        self._clear()

    def _clear(self) -> None:
        self._sites.clear()
        self._twins.clear()
        self._found = []
        self._ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if takes_apart(types, (args, kwargs)):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            site = self._sites.of(kernel_name(func))
            self._ops += 1
            if site.phase not in ("forward", "loss") or site.recompute:
                return func(*args, **kwargs)
            call = _Call(func, args, kwargs, self._twin)
            wide, alone = call.in_fp32()
            result = func(*args, **kwargs)
            for written in call.written:
                self._twins.pop(storage_key(written), None)  # other views of this memory have no twin from here on
            here = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            if [t.shape for t in here] != [t.shape for t in wide]:
                wide = alone = []
            if wide and self._right and _place(site.where(self._step, "none")) in self._right:
                kept = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
                with kept(here[0]):  # autograd may keep it as what the op gave
                    here[0].copy_(wide[0])
            self._note(site, call, here, wide, alone)
            return result

    def _twin(self, tensor: torch.Tensor) -> _Twin | None:
        twin = self._twins.get(storage_key(tensor), {}).get(view_key(tensor)) if self._twins else None
        return None if twin is None or twin.value.shape != tensor.shape else twin

    def _note(
        self,
        site: Site,
        call: _Call,
        here: Sequence[torch.Tensor],
        wide: Sequence[torch.Tensor],
        alone: Sequence[torch.Tensor],
    ) -> None:
        """Remember the results' twins, and what was made of the inputs' errors."""
        if not wide:
            for tensor in here:
                self._forget(tensor)
            return
        before = max((made.error for made in call.made), default=0.0)
        for index, (result, twin, rounded) in enumerate(zip(here, wide, alone or wide, strict=True)):
            error, rounding, carried = _errors(result, twin, rounded)
            if not error > 0.0:
                self._forget(result)
                continue
            made = _Made(
                order=self._ops,
                site=site,
                dtype=result.dtype,
                error=error,
                rounding=rounding,
                carried=carried,
                contracts=call.contracts,
                inputs=call.made,
            )
            self._twins.setdefault(storage_key(result), {})[view_key(result)] = _Twin(twin, made)
            # further results are statistics for the backward: the mean of what has none is nothing but rounding
            if index == 0 and error > SEEN and error > AMPLIFIES * before and (sources := _sources(made)):
                self._found.append(self._amplified(made, before, sources))

    def _forget(self, tensor: torch.Tensor) -> None:
        if self._twins:
            self._twins.get(storage_key(tensor), {}).pop(view_key(tensor), None)

    def _amplified(self, made: _Made, before: float, sources: list[_Made]) -> Amplified:
        source, *beside = sources
        return Amplified(
            order=made.order,
            where=made.site.where(self._step, "none"),
            error=made.error,
            before=before,
            source=source.site.where(self._step, "none"),
            dtype=str(source.dtype).removeprefix("torch."),
            rounding=source.rounding,
            beside=tuple(one.site.where(self._step, "none") for one in beside),
        )


def _place(where: Where) -> tuple[str, str | None, Source | None]:
    return where.module, where.op, where.source


def _sources(made: _Made) -> list[_Made]:
    """Returns the ops whose own rounding an error came from: the one that brings most of it first, then others like it.

    The way goes back through the inputs as long as they bring more than the op adds. Nothing is returned where it comes
    to a product of matrices: what that hands on is the rounding of a network, and no single place is behind it.
    """
    ahead, found, followed = [made], dict[int, _Made](), 0
    while ahead and followed < MOST_FOLLOWED:
        one, followed = ahead.pop(), followed + 1
        if one.inputs and one.carried > one.rounding:
            if one.contracts:
                return []
            least = ALIKE * max(each.error for each in one.inputs)
            ahead += sorted((each for each in one.inputs if each.error >= least), key=lambda each: each.error)
        else:
            found.setdefault(one.order, one)
    return list(found.values())[:MOST_SOURCES]


class _MadeOfNumbers(TorchFunctionMode):
    """Tells the probe of tensors that the step's code makes of numbers: the op beneath sees them rounded already."""

    def __init__(self, probe: WideForwardProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        wide = wide_numbers(func, kwargs)
        if wide is not kwargs and not in_backward():
            with torch._C.DisableTorchFunction(), no_modes():
                self._probe.made(result.detach(), func(*args, **wide).detach())
        return result


class _Call:
    """An op that is about to run.

    Args:
        func: The ATen overload.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        twin: What is known of a tensor.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, twin: Any) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        tensors = list(tensors_in([*args, *kwargs.values()]))
        self._twins = {id(t): found for t in tensors if (found := twin(t)) is not None}
        self.made = tuple(found.made for found in self._twins.values())
        self.written = [t for name, t in _writes(func, args, kwargs)]
        kernel = kernel_name(func)
        self.contracts = kernel in _CONTRACTIONS or kernel.startswith(("_scaled_dot_product", "mkldnn_rnn"))
        self._plain = _is_plain(func) and not any(t.is_nested or t.is_sparse for t in tensors)
        self._plain = self._plain and all(t.is_floating_point() for t in self.written)

    def in_fp32(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the results from the inputs' twins, and those from the inputs as they are; [] where unknown.

        Both are lists of the tensors that the op returns; the second is empty where no input has a twin, as it would be
        the first.
        """
        if not self._plain:
            return [], []
        if not self.made:
            return self._run(self._args, self._kwargs), []
        wide = self._run(*tree_map(self._instead, (self._args, self._kwargs)))
        alone = self._run(self._args, self._kwargs) if wide else []
        return (wide, alone) if [t.shape for t in wide] == [t.shape for t in alone] else ([], [])

    def _instead(self, item: Any) -> Any:
        twin = self._twins.get(id(item)) if isinstance(item, torch.Tensor) else None
        return item if twin is None else twin.value

    def _run(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        try:
            with torch.no_grad():
                result = self._func(*widened(args, single=True), **widened(kwargs, single=True))
        except NO_RESULT:
            return []
        return [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def _is_plain(func: Any) -> bool:
    """An ATen op that draws nothing and fills what it returns: to run it once more changes nothing."""
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return False
    return func.namespace == "aten" and kernel_name(func) not in UNINITIALISED and not reads_layout(func)


def _writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the arguments that an op changes in place, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from ((argument.name, t) for t in tensors_in(value))


def _errors(result: torch.Tensor, twin: torch.Tensor, alone: torch.Tensor) -> tuple[float, float, float]:
    """Returns the relative L2 errors of a result against its twin: whole, its op's own part, and what it inherits.

    Elements that are not finite, here or there, are left out: a mask is no error, and an overflow is a birth.
    """
    if result.is_complex() or twin.is_complex():
        return 0.0, 0.0, 0.0
    here, there, rounded = (t.detach().double() for t in (result, twin, alone))
    fine = torch.isfinite(here) & torch.isfinite(there) & torch.isfinite(rounded)
    here, there, rounded = (torch.where(fine, t, 0.0) for t in (here, there, rounded))
    size = max(float(there.norm()), float(here.norm()), float(rounded.norm()))
    if not size:
        return 0.0, 0.0, 0.0
    parts = (here - there, here - rounded, rounded - there)
    whole, own, carried = (float(part.norm()) / size for part in parts)
    return (whole, own, carried) if math.isfinite(whole) else (0.0, 0.0, 0.0)
