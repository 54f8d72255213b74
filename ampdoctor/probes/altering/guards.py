"""Guards: an op's operand or result held in bounds, chosen by trying it on the values at hand.

What a guard must do is measured, not looked up: the op and its derivative are run on the operand as the guard leaves
it, and of the guards with which both are finite the one is taken that changes the operand least. The derivative is
taken for a gradient of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.probes.ops.recompute import NO_RESULT

EPSILONS = (1e-6, 1e-3)
"""What fp32 holds with a derivative below 1e6, then what fp16 holds as a normal number as well."""
BOUNDS = (
    1e18,
    *(torch.finfo(narrow).max for narrow in (torch.float16, torch.float8_e5m2)),
    1e4,
    torch.finfo(torch.float8_e4m3fn).max,
    80.0,
    10.0,
)
"""Largest magnitudes of an operand: its square fits fp32; a cast to fp16, to each FP8 format; its
exponential fits fp32, and fp16."""

NEAR_ONE = 2.0**-6
"""How far beyond 1 an operand may be that is meant to lie in [-1, 1]: a cosine or a probability in bf16 is a few
roundings of 2^-8 off. What reaches further is a logit or a distance, which nobody clamps to 1."""

Deed = Literal["away from zero", "above zero", "finite", "inside (-1, 1)", "below", "result", "derivative"]


@dataclass(frozen=True, slots=True)
class Guard:
    """One operand of an op, or its result, held in bounds.

    Attributes:
        deed: What is done.
        operand: Which floating-point tensor among the arguments; -1 for all, and for the result.
        bound: The epsilon or the largest magnitude, 0.0 where the deed has none.
    """

    deed: Deed
    operand: int = -1
    bound: float = 0.0

    @property
    def words(self) -> str:
        """The guard as an instruction."""
        what = "its operand" if self.operand < 0 else f"operand {self.operand + 1}"
        return {
            "away from zero": f"keep {what} at least {self.bound:g} away from zero",
            "above zero": f"clamp {what} to at least {self.bound:g}",
            "finite": f"write finfo.min where {what} has -inf (or skip such rows)",
            "inside (-1, 1)": f"clamp {what} to ±(1 - {self.bound:g})",
            "below": f"clamp {what} to ±{self.bound:g}",
            "result": "replace what is undefined in its result and its derivative by 0",
            "derivative": "take its derivative as 0 where that is undefined (torch.where around the operand, too)",
        }[self.deed]

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The op with the guard in place, differentiable.

        Args:
            func: The op.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        leaves, spec = tree_flatten((args, kwargs))
        place = -1
        for index, leaf in enumerate(leaves):
            if _guardable(leaf):
                place += 1
                if self.operand in (-1, place):
                    leaves[index] = self._held(leaf)
        held_args, held_kwargs = tree_unflatten(leaves, spec)
        result = func(*held_args, **held_kwargs)
        if self.deed == "result" and isinstance(result, torch.Tensor):
            return torch.nan_to_num(result)
        return result

    def harshness(self, operands: Sequence[torch.Tensor]) -> float:
        """By how much the guard changes its operand, relative to the operand where that is above 1; infinities aside.

        Args:
            operands: The floating-point tensors among the op's arguments.
        """
        changes = []
        for operand in operands if self.operand < 0 else (operands[self.operand],):
            wide = operand.detach().double()
            fine = torch.where(torch.isfinite(wide), wide, 0.0)
            changes.append(float((self._held(fine) - fine).norm() / fine.norm().clamp(min=1.0)))
        return sum(changes)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        bound = self.bound
        if self.deed == "away from zero":
            return torch.where(tensor.abs() < bound, torch.where(tensor < 0, -bound, bound).to(tensor.dtype), tensor)
        if self.deed == "above zero":
            return tensor.clamp(min=bound)
        if self.deed == "finite":
            return tensor.clamp(torch.finfo(tensor.dtype).min, torch.finfo(tensor.dtype).max)
        if self.deed == "inside (-1, 1)":
            return tensor.clamp(bound - 1.0, 1.0 - bound)
        if self.deed == "below":
            return tensor.clamp(-bound, bound)
        if self.deed in ("derivative", "result") and tensor.requires_grad:
            seen = tensor.view_as(tensor)
            on_gradient(seen, lambda gradient: torch.nan_to_num(gradient, posinf=0.0, neginf=0.0))
            return seen
        return tensor


def choose_guard(func: Callable[..., Any], args: Any, kwargs: Any) -> Guard | bool:
    """The gentlest guard with which the op and its derivative are finite on these arguments.

    Args:
        func: The op.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The guard; True where none is needed, False where none helps.
    """
    state = torch.get_rng_state()
    try:
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if _guardable(leaf)]
        if _sound(func, args, kwargs, None):
            return True
        gentlest = sorted(_candidates(leaves), key=lambda guard: guard.harshness(leaves))
        gentlest += _last_resort(func, args, kwargs)
        return next((guard for guard in gentlest if _sound(func, args, kwargs, guard)), False)
    finally:
        torch.set_rng_state(state)


def _guardable(value: Any) -> bool:
    """A floating-point tensor that can be clamped: FP8 has no arithmetic."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1


def _candidates(leaves: Sequence[torch.Tensor]) -> Iterator[Guard]:
    """Every guard that would change something."""
    for operand, leaf in enumerate(leaves):
        if bool((leaf == torch.inf).any()):
            continue  # no mask's: it is to be cured where it arises, and a large number in its place means nothing
        if bool(torch.isinf(leaf).any()):
            yield Guard("finite", operand)
        for epsilon in EPSILONS:
            if bool((leaf == 0).any()):
                yield Guard("away from zero", operand, epsilon)
            if bool((leaf <= 0).any()):
                yield Guard("above zero", operand, epsilon)
            if leaf.numel() and 1.0 - epsilon < float(leaf.detach().abs().max()) <= 1.0 + NEAR_ONE:
                yield Guard("inside (-1, 1)", operand, epsilon)
        yield from (Guard("below", operand, bound) for bound in BOUNDS if bool((leaf.abs() > bound).any()))
    if any(bool(torch.isinf(leaf).any()) for leaf in leaves) and not any(bool((t == torch.inf).any()) for t in leaves):
        yield Guard("finite")


def _last_resort(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Guard]:
    """What needs no bound on an operand: for a result that is undefined, or defined with an undefined derivative.

    Not for an infinite result: the largest number in its place would be finite, and mean nothing.
    """
    copies = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
    try:
        with torch.no_grad():
            result = func(*copies[0], **copies[1])  # copies, because an op may work in place
    except NO_RESULT:
        return []
    if not isinstance(result, torch.Tensor) or not _guardable(result) or bool(torch.isinf(result).any()):
        return []
    return [Guard("result" if bool(torch.isnan(result).any()) else "derivative")]


def _sound(func: Callable[..., Any], args: Any, kwargs: Any, guard: Guard | None) -> bool:
    """Are the op and its derivative finite on copies of the arguments?"""
    leaves, spec = tree_flatten((args, kwargs))
    copies: list[torch.Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = leaf.detach().clone()
            if leaf.is_floating_point() and torch.is_grad_enabled():
                copies.append(leaves[index].requires_grad_())
                leaves[index] = copies[-1].clone()  # an op may work in place, which no leaf and no view of one allows
    own_args, own_kwargs = tree_unflatten(leaves, spec)
    try:
        result = func(*own_args, **own_kwargs) if guard is None else guard.run(func, own_args, own_kwargs)
        results = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if not all(map(_finite, results)):
            return False
        roots = [t for t in results if t.requires_grad]
        if not roots:
            return True
        gradients = torch.autograd.grad(roots, copies, [torch.ones_like(t) for t in roots], allow_unused=True)
    except NO_RESULT:
        return False
    return all(gradient is None or _finite(gradient) for gradient in gradients)


def _finite(tensor: torch.Tensor) -> bool:
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    return bool(torch.isfinite(wide).all())
