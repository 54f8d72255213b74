"""The forward twice, op by op: as it runs, and in fp32 on the inputs' fp32 values, from the batch on.

Rounding moves a result by a few units in the last place, and most ops pass such an error on unchanged. This probe finds
ops that enlarge it: an index that becomes another one, the sine of a large angle, the small difference of large sums.
From there it follows the inputs back to the op whose own rounding made most of that error.

A wide shadow beside each value, with the error split into what an op inherits and what it adds, is the idea of FpDebug
(Benz, Hildebrandt, Hack: A dynamic program analysis to find floating-point accuracy problems, PLDI 2012).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.trace import Amplified
from ampdoctor.hooks.torch_internals import in_backward, no_modes
from ampdoctor.precision.dtype_overrides import wide_numbers
from ampdoctor.probes.modules import tensors_in
from ampdoctor.probes.ops import UNINITIALISED, OpProbe, Site, kernel_name, reads_layout, written
from ampdoctor.probes.recompute import NO_RESULT, widened
from ampdoctor.probes.tensor_memory import ByMemory, storage_key, view_key

AMPLIFIES = 8.0
"""Factor by which an op has to enlarge a relative error.

Sums, products and activations keep it or make it smaller; a softmax over logits of +-10 enlarges it ten times, but a
rounding of 2^-9 to less than `SEEN`.
"""
SEEN = 1.0 / 32  # relative L2 error of a result from which it is recorded: eight roundings to bf16 that all add up
ALIKE = 0.25  # share of the largest error among an op's inputs from which another input counts as well
MOST_SOURCES = 4  # sources that are named: an angle has two, the position and the rate
MOST_FOLLOWED = 64  # values that are followed back; an error from further back is the rounding of a whole network
_CONTRACTIONS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution"})
"""Kernels that sum up products; attention's (`_scaled_dot_product_...`) and recurrent layers' go by their names."""


@dataclass(frozen=True, slots=True)
class _Made:
    """How a value got its error; errors are relative L2 errors."""

    order: int  # position of its op
    site: Site
    dtype: torch.dtype  # of the result
    error: float  # against the fp32 value
    rounding: float  # the part that the op adds
    carried: float  # the part that its inputs bring
    contracts: bool  # the op sums up products, e.g. a matrix product
    inputs: tuple[_Made, ...]


@dataclass(frozen=True, slots=True)
class _Twin:
    """The values that a tensor would have in fp32, and how it got its error."""

    value: torch.Tensor
    made: _Made


class WideForwardProbe(OpProbe):
    """Finds ops that enlarge errors (`amplified`); at the places in `right` the step gets the fp32 results, rounded."""

    def __init__(self, right: Collection[Where] = ()) -> None:
        super().__init__()
        self._right = frozenset(map(_place, right))
        self.amplified: tuple[Amplified, ...] = ()
        self._twins: ByMemory[dict[tuple[Any, ...], _Twin]] = ByMemory()
        self._found: list[Amplified] = []
        self._ops = 0

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        with super().during(step), _MadeOfNumbers(self):
            yield

    def made(self, result: torch.Tensor, wide: torch.Tensor) -> None:
        """Note a half tensor that the step's code made of numbers, and its fp32 values (`wide`)."""
        site = self._sites.of("tensor")
        self._ops += 1
        error, rounding, carried = _errors(result, wide, wide)
        if error > 0.0:
            made = _Made(self._ops, site, result.dtype, error, rounding, carried, contracts=False, inputs=())
            self._twins.setdefault(storage_key(result), {})[view_key(result)] = _Twin(wide, made)

    def finish(self, step: int, loss: Any) -> None:
        super().finish(step, loss)
        self.amplified = tuple(self._found)
        self.begin()

    def begin(self) -> None:
        self._twins.clear()
        self._found = []
        self._ops = 0

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        self._ops += 1
        if site.phase not in ("forward", "loss") or site.recompute:
            return func(*args, **kwargs)
        call = _Call(func, args, kwargs, self._twin)
        wide, alone = call.in_fp32()
        result = func(*args, **kwargs)
        for changed in call.written:
            self._twins.pop(storage_key(changed), None)  # fp32 values of other views of this memory are outdated
        here = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if [t.shape for t in here] != [t.shape for t in wide]:
            wide = alone = []
        if wide and self._right and _place(site.where(self._step, "none")) in self._right:
            kept = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
            with kept(here[0]):  # autograd may have saved it as the op's result
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
        """Record the results' fp32 values, and whether the op enlarged the inputs' errors."""
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
            # further results are statistics for the backward: a mean of about zero consists of rounding errors
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
    """The ops whose own rounding caused an error, the largest first; [] where it comes from a product of matrices."""
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
    """Notes tensors that the step's code makes of numbers: the op below the mode gets them rounded already."""

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
    """An op that is about to run; `twin` gives what is known of a tensor."""

    def __init__(self, func: Any, args: Any, kwargs: Any, twin: Any) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        tensors = list(tensors_in([*args, *kwargs.values()]))
        self._twins = {id(t): found for t in tensors if (found := twin(t)) is not None}
        self.made = tuple(found.made for found in self._twins.values())
        self.written = [*written(func, args, kwargs)]
        kernel = kernel_name(func)
        self.contracts = kernel in _CONTRACTIONS or kernel.startswith(("_scaled_dot_product", "mkldnn_rnn"))
        self._plain = _is_plain(func) and not any(t.is_nested or t.is_sparse for t in tensors)
        self._plain = self._plain and all(t.is_floating_point() for t in self.written)

    def in_fp32(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results in fp32 from the inputs' fp32 values, and from the inputs as they are if that differs."""
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
    """Whether it is an ATen op that draws no random numbers and fills its results, so that it can be run once more."""
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return False
    return func.namespace == "aten" and kernel_name(func) not in UNINITIALISED and not reads_layout(func)


def _errors(result: torch.Tensor, twin: torch.Tensor, alone: torch.Tensor) -> tuple[float, float, float]:
    """The relative L2 errors of a result's finite elements against `twin` (fp32): total, by the op, inherited."""
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
