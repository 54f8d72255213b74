"""What took an op out of its domain: the input without which it is finite, and what made that input so.

The op is run again in float64 with one input changed: lost elements restored, zeros replaced by ones, or all elements
by one half. An input is at fault if the op then is finite in an element where it was not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.trace import Operand, Recomputation
from ampdoctor.probes.lost_values import LITERALS, Producer, Provenance, is_plain, lost_numbers
from ampdoctor.probes.modules import tensors_in
from ampdoctor.probes.nonfinite import dense, dtype_name
from ampdoctor.probes.ops import PICKS, SUMS, Ran
from ampdoctor.probes.recompute import NO_RESULT, doubled, widely
from ampdoctor.probes.user_code import as_source

INSIDE = 0.5  # in the domain of every function with a limited domain: log, sqrt, pow, acos, atanh, the logit


def operand_of(
    ran: Ran, verdict: Recomputation | None, provenance: Provenance, meant: Where | None = None
) -> Operand | None:
    """The input of an origin that made the op invalid; None for an overflow, or where no single input is at fault."""
    number = nonfinite_number(ran)
    if number is not None:
        return described(None, "number", here=number)
    if verdict is not None and (verdict.finite or verdict.overflow):
        return None if verdict.overflow or verdict.amax > verdict.limit else lost_inside(ran)
    if any(t.numel() == 0 for t in tensors_in([*ran.call.args, *ran.call.kwargs.values()])):
        return described(None, "empty_input", here=None)
    if ran.bad:
        return _infinite(ran, meant)
    return (
        _lost(ran, provenance)
        or _changed(ran, provenance, _ones_for_zeros)
        or _zero_number(ran)
        or _changed(ran, provenance, lambda t: torch.full_like(t, INSIDE) if t.is_floating_point() else None)
        # class 0 for all targets: finite if all were ignored, so that there was nothing to average
        or _changed(ran, provenance, lambda t: None if t.is_floating_point() else torch.zeros_like(t))
        # an op of another library that no change of an input makes finite
        or (described(None, "any", here=None) if ran.func.namespace != "aten" and ran.call.repeatable else None)
    )


def nonfinite_number(ran: Ran) -> float | None:
    """The first non-finite Python number among an op's arguments, if any."""
    numbers = [item for item in tree_leaves((ran.call.args, ran.call.kwargs)) if isinstance(item, float)]
    return next((number for number in numbers if not math.isfinite(number)), None)


def described(
    maker: Producer | None, made_by: str | None = None, *, here: float | None, meant: float | None = None
) -> Operand:
    """An operand for the report; `made_by` overrides the maker's, `meant` is a lost element's float64 value."""
    if maker is None:
        return Operand(made_by=made_by or "constant", here=here, float64=meant)
    site = maker.site
    return Operand(
        made_by=made_by or maker.made_by,
        op=f"aten.{site.op}" if site is not None else None,
        module=site.module if site is not None else None,
        source=as_source(site.line or site.forward_line) if site is not None else None,
        dtype=str(maker.dtype).removeprefix("torch."),
        here=here,
        float64=meant,
        fraction=maker.fraction,
        amax=maker.amax,
    )


def lost_inside(ran: Ran) -> Operand | None:
    """A constant of the op or of its kernel's code that its format rounds to 0 or 1, and that causes the failure."""
    for dtype in dict.fromkeys(result.dtype for result in ran.results):
        for number, rounded in lost_numbers(ran.call, dtype, ran.kernel):
            if number not in LITERALS.get(ran.kernel, ()) and not _heals(ran, number, dtype):
                continue
            made_by = "rounded_to_one" if rounded else "flushed_epsilon"
            own = Producer(made_by, ran.site, dtype, fraction=1.0, amax=abs(number))
            return described(own, here=rounded, meant=number)
    return None


def _heals(ran: Ran, number: float, dtype: torch.dtype) -> bool:
    """Whether the op is finite with a number that its format can hold instead of this one; True if it cannot be run."""
    info = torch.finfo(dtype)
    held = math.copysign(info.tiny if abs(number) < INSIDE else 1.0 - info.eps, number)

    def hold(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            same = item.numel() == 1 and float(item.detach()) == number
            return torch.full_like(item, held) if same else item.detach().clone()
        return held if isinstance(item, float) and item == number else item

    args, kwargs = tree_map(hold, (ran.call.args, ran.call.kwargs))
    try:
        with torch.no_grad():
            again = ran.call.again(ran.func, args, kwargs)
    except NO_RESULT:
        return True
    return [t.shape for t in again] != [t.shape for t in ran.results] or _finite_again(ran, again) is not None


def _infinite(ran: Ran, meant: Where | None) -> Operand:
    """Intended infinities (a mask) as the operand: a whole row of them, or of both signs."""
    bad = ran.bad[0]
    values = doubled(dense(_before(ran, bad)))
    here = float(values[torch.isinf(values)][0])
    return Operand(
        made_by=_how_infinite(ran, values),
        op=meant.op if meant is not None else None,
        module=meant.module if meant is not None else None,
        source=(meant.source or meant.forward_source) if meant is not None else None,
        dtype=dtype_name(bad),
        here=here,
    )


def _how_infinite(ran: Ran, values: torch.Tensor) -> str:
    if ran.kernel in SUMS:
        return "masked_target" if ran.kernel in PICKS else "added_up"
    if values.dim() == 0:
        return "infinity"
    along = next((a for a in ran.call.args[1:2] if isinstance(a, int) and ran.kernel.endswith("softmax")), -1)
    masked = (values == -math.inf).all(along)  # a class that every sample masks is a column, not a row
    return "masked_row" if values.shape[along] > 1 and bool(masked.any()) else "infinity"


def _lost(ran: Ran, provenance: Provenance) -> Operand | None:
    """An input that lost elements in its format, and with which the op is finite once they are restored."""
    inherited = provenance.inherited(ran.call)
    for tensor in ran.call.reads:
        if id(tensor) not in inherited:
            continue
        meant, maker = inherited[id(tensor)]
        healed = _healed(ran, _instead(tensor, meant))
        if healed is None:
            continue
        before = _before(ran, tensor)
        changed = doubled(before) != meant
        at = _chosen(healed, changed)
        here, there = float(doubled(before)[changed][at]), float(meant[changed][at])
        return described(maker, here=here, meant=there)
    return None


def _changed(ran: Ran, provenance: Provenance, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Operand | None:
    """The input with which the op is finite once it is changed."""
    seen: set[int] = set()
    for item in tensors_in([*ran.call.args, *ran.call.kwargs.values()]):
        # the tensor itself, for the copy that was made of it before the op wrote it
        tensor = next((r for r, b in zip(ran.call.reads, ran.call.before, strict=True) if b is item), item)
        if id(tensor) in seen or not is_plain(item):
            continue
        seen.add(id(tensor))
        instead = change(item)
        if instead is None:
            continue
        healed = _healed(ran, _instead(tensor, instead))
        if healed is None:
            continue
        differs = doubled(dense(item)) != doubled(instead)
        here = float(doubled(dense(item))[differs][_chosen(healed, differs)])
        maker = provenance.zeros(tensor) if here == 0 else provenance.maker(tensor)
        return described(maker, here=here)
    return None


def _ones_for_zeros(tensor: torch.Tensor) -> torch.Tensor | None:
    zero = dense(tensor) == 0
    return torch.where(zero, torch.ones_like(tensor), tensor) if bool(zero.any()) else None


def _zero_number(ran: Ran) -> Operand | None:
    """A zero that is written in the call: `x / 0.0`."""
    if not any(isinstance(a, float) and a == 0.0 for a in ran.call.args):
        return None
    call = replace(ran.call, args=tree_map(lambda a: 1.0 if isinstance(a, float) and a == 0.0 else a, ran.call.args))
    if _finite_again(ran, widely(ran.func, call)) is None:
        return None
    return described(Producer("constant", ran.site, ran.results[0].dtype), here=0.0)


def _instead(tensor: torch.Tensor, value: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor | None]:
    return lambda other: value if other is tensor else None


def _before(ran: Ran, tensor: torch.Tensor) -> torch.Tensor:
    return next(b for r, b in zip(ran.call.reads, ran.call.before, strict=True) if r is tensor)


def _healed(ran: Ran, substitute: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor | None:
    """Elements of a result that are finite with some inputs changed; None where none is."""
    if not ran.call.repeatable:
        return None
    return _finite_again(ran, widely(ran.func, ran.call.substituted(substitute)))


def _finite_again(ran: Ran, again: list[torch.Tensor]) -> torch.Tensor | None:
    if [t.shape for t in again] != [t.shape for t in ran.results]:
        return None
    for result, other in zip(ran.results, again, strict=True):
        healed = ~torch.isfinite(doubled(dense(result))) & torch.isfinite(other)
        if bool(healed.any()):
            return healed
    return None


def _chosen(healed: torch.Tensor, changed: torch.Tensor) -> int:
    """Index of the first changed element at the position of a healed one; 0 where shapes do not show which it was."""
    try:
        under = torch.broadcast_to(changed, healed.shape) & healed
    except RuntimeError:
        return 0
    if changed.shape != healed.shape or not bool(under.any()):
        return 0
    first = int(under.flatten().nonzero()[0])
    return int(changed.flatten()[:first].sum())
