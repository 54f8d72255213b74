"""Runs an op at a user's line differently: in fp32, in fp64, behind a guard, without a cast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.trace import NonFiniteOrigin
from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.hooks.program import called_as_recorded, recorded_line
from ampdoctor.package import FOLDER
from ampdoctor.precision.casting import REDUCED
from ampdoctor.precision.dtype_overrides import wide_numbers
from ampdoctor.probes.modules import ModuleStack
from ampdoctor.probes.ops import CASTS, FunctionNames, changes_shape, function_name
from ampdoctor.probes.recompute import NO_RESULT
from ampdoctor.probes.user_code import as_source, user_line

# -- guards: an op's operand or result is kept within bounds --
#
# The guard is chosen by trial: the op and its derivative (for a gradient of ones) are run on the guarded operand, and
# of the guards with which both are finite, the one that changes the operand least is used.

EPSILONS = (1e-6, 1e-3)  # the first keeps derivatives below 1e6 in fp32; the second is a normal number in fp16 as well
BOUNDS = (
    1e18,
    *(torch.finfo(narrow).max for narrow in (torch.float16, torch.float8_e5m2)),
    1e4,
    torch.finfo(torch.float8_e4m3fn).max,
    80.0,
    10.0,
)  # largest magnitudes: the square fits fp32; a cast to fp16, to each FP8 format; the exponential fits fp32, fp16

NEAR_ONE = 2.0**-6  # a cosine or a probability in bf16 is off by a few roundings of 2^-8
"""How far an operand meant to lie in [-1, 1] may exceed 1; larger ones are logits or distances, not clamped to 1."""

Deed = Literal["away from zero", "above zero", "finite", "inside (-1, 1)", "below", "result", "derivative"]


@dataclass(frozen=True, slots=True)
class Guard:
    """One operand of an op, or its result, kept within bounds."""

    deed: Deed
    operand: int = -1  # index among the floating-point tensors of the arguments; -1: all, or the result
    bound: float = 0.0  # the epsilon or the largest magnitude; 0.0 if the deed has none
    of: int = field(default=1, compare=False)  # how many such tensors there are
    signed: bool = field(default=False, compare=False)  # the operand has negative values

    def words(self, op: str) -> str:
        """The guard as an instruction, with an expression for the operand `x` of the function `op`."""
        what = f"input {self.operand + 1} of {op}" if self.of > 1 and self.operand >= 0 else f"the input of {op}"
        if op == "torch.div" and self.operand == 1:
            what = "the divisor"
        b = f"{self.bound:g}"
        away = f"torch.where(x.abs() < {b}, {b}, x)" if self.signed else f"x.clamp_min({b})"
        return {
            "away from zero": f"keep {what} at least {b} away from zero, e.g. {away}",
            "above zero": f"clamp {what} to at least {b}, e.g. x.clamp_min({b})",
            "finite": f"write torch.finfo(x.dtype).min where {what} has -inf (or skip such rows)",
            "inside (-1, 1)": f"clamp {what} to ±(1 - {b}), e.g. x.clamp({b} - 1, 1 - {b})",
            "below": f"clamp {what} to ±{b}, e.g. x.clamp(-{b}, {b})",
            "result": f"replace what is undefined in the result of {op}, and in its derivative, by 0",
            "derivative": f"take the derivative of {op} as 0 where that is undefined (torch.where around x, too)",
        }[self.deed]

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of the op with the guard in place, differentiable."""
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
        """The relative change of the operands (absolute for norms below 1) by the guard, without infinities."""
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
    """The guard with the least change that makes op and derivative finite; True: none needed, False: none helps."""
    state = torch.get_rng_state()
    try:
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if _guardable(leaf)]
        if _sound(func, args, kwargs, None):
            return True
        gentlest = sorted(_candidates(leaves), key=lambda guard: guard.harshness(leaves))
        gentlest = [replace(guard, of=len(leaves)) for guard in gentlest]
        gentlest += _last_resort(func, args, kwargs)
        return next((guard for guard in gentlest if _sound(func, args, kwargs, guard)), False)
    finally:
        torch.set_rng_state(state)


def _guardable(value: Any) -> bool:
    """Whether it is a floating-point tensor that can be clamped: FP8 has no arithmetic."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1


def _candidates(leaves: Sequence[torch.Tensor]) -> Iterator[Guard]:
    """Every guard that would change something."""
    for operand, leaf in enumerate(leaves):
        if bool((leaf == torch.inf).any()):
            continue  # not a mask: it must be fixed where it first appears; a large number instead would be meaningless
        if bool(torch.isinf(leaf).any()):
            yield Guard("finite", operand)
        for epsilon in EPSILONS:
            if bool((leaf == 0).any()):
                yield Guard("away from zero", operand, epsilon, signed=bool((leaf < 0).any()))
            if bool((leaf <= 0).any()):
                yield Guard("above zero", operand, epsilon)
            if leaf.numel() and 1.0 - epsilon < float(leaf.detach().abs().max()) <= 1.0 + NEAR_ONE:
                yield Guard("inside (-1, 1)", operand, epsilon)
        yield from (Guard("below", operand, bound) for bound in BOUNDS if bool((leaf.abs() > bound).any()))
    if any(bool(torch.isinf(leaf).any()) for leaf in leaves) and not any(bool((t == torch.inf).any()) for t in leaves):
        yield Guard("finite")


def _last_resort(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Guard]:
    """Guards without a bound, for an undefined result or derivative; none for an infinite result."""
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
    """Whether the op and its derivative are finite on copies of the arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    copies: list[torch.Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = leaf.detach().clone()
            if leaf.is_floating_point() and torch.is_grad_enabled():
                copies.append(leaves[index].requires_grad_())
                leaves[index] = copies[-1].clone()  # autograd allows no in-place op on a leaf or a view of it
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


# -- interventions: the op at an origin's line runs as if the user's code were changed there --
#
# The op is found by its line and its name, not by its position in the step: a change of code affects every call of that
# line, also those of later steps.

_OURS = f"{FOLDER}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_IN_BETWEEN = str(FOLDER / "precision" / "fake_gpu") + os.sep  # the user's own calls pass through it (Tensor.to)
_DEVICES = ("cpu", "cuda")
_FUNCTIONAL = ("torch.nn.functional", "torch.functional", "torch")
How = Literal["fp32", "line_fp32", "fp64", "line_fp64", "guard", "line_guard"]
"""The op, or everything on its line, in fp32, in fp64, or in fp32 with operands or results kept within bounds."""


@dataclass(frozen=True, slots=True)
class UserLine:
    """A place in the user's code; for a derivative the line of the forward op."""

    source: Source
    op: str  # without namespace, as in `Where.op`
    in_fp32: bool = field(default=False, compare=False)  # it ran in fp32 (or fp64) anyway


def address_of(origin: NonFiniteOrigin) -> UserLine | None:
    """Where to change the code for an origin; None where no line of the user's own runs its op."""
    address = address_at(origin.where, after_backward=origin.after_backward)
    seen = {stats.dtype for stats in (*origin.inputs, *origin.outputs)}
    return None if address is None else replace(address, in_fp32=bool(seen) and seen <= {"float32", "float64"})


def address_at(where: Where, *, after_backward: bool = False) -> UserLine | None:
    """Where to change the code; None where no line of the user's own runs the op (an optimizer of torch's)."""
    source = where.source or where.forward_source
    theirs = after_backward or where.phase not in ("optimizer", "scaler", "data", "checkpoint")
    if source is None or where.op is None or not theirs:
        return None
    return UserLine(source, where.op.partition(".")[2])


class Intervention(FunctionNames):
    """Changes how ops at some addresses run while it is on; with `narrow`, results return to the format of the inputs.

    A chosen guard is kept in `guards`, for later runs. `helpless` are the addresses where no guard helped.
    """

    def __init__(self, addresses: Sequence[UserLine], how: How, *, narrow: bool = False) -> None:
        super().__init__()
        self._addresses = tuple(dict.fromkeys(addresses))
        self._files = {address.source.file for address in addresses}
        self._how = how
        self._narrow = narrow
        self.met: set[UserLine] = set()  # that ran
        self.guards: dict[tuple[UserLine, str], Guard] = {}
        self.helpless: set[UserLine] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        address = self._address(func)
        if address is None:
            return func(*args, **kwargs)
        self.met.add(address)
        if changes_shape(function_name(func)):
            return func(*args, **kwargs)  # on a copy in another format, the user's tensor would stay unchanged
        return self._otherwise(address, func, args, kwargs)

    def _address(self, func: Callable[..., Any]) -> UserLine | None:
        name = function_name(func)
        if name is None and getattr(func, "__module__", None) not in _FUNCTIONAL:
            return None  # a property, a size
        source = calling_line()
        if source is None:
            return None
        return next((a for a in self._addresses if a.source == source and self._reached(a, name)), None)

    def _reached(self, address: UserLine, name: str | None) -> bool:
        if self._how.startswith("line") or name is None:
            return True  # a function written in Python: the ops inside are not seen
        if address.op in CASTS:
            return True  # autocast's own cast, inside any op of the line
        return name == address.op or name.rstrip("_") == address.op.rstrip("_")

    def _otherwise(self, address: UserLine, func: Any, args: Any, kwargs: Any) -> Any:
        guarded = self._how.endswith("guard")
        wide = torch.float64 if self._how.endswith("fp64") else torch.float32
        name = function_name(func) or ""
        target = cast_target(func, args, kwargs) if name in CASTS else None
        if target is not None and target.itemsize < wide.itemsize and not guarded:
            return args[0].to(wide)  # the narrowing cast itself is what the intervention removes
        inputs, keywords = (args, kwargs) if target is not None else (_widened(args, wide), _widened(kwargs, wide))
        with _no_autocast():
            if guarded:
                guard = self._guard(address, func, inputs, keywords)
                result = guard.run(func, inputs, keywords) if guard is not None else func(*inputs, **keywords)
            else:
                result = func(*inputs, **keywords)
        return self._returned(func, args, kwargs, result, wide)

    def _guard(self, address: UserLine, func: Any, args: Any, kwargs: Any) -> Guard | None:
        key = address, function_name(func) or ""  # the line of a cast has other ops as well
        guard = self.guards.get(key)
        if guard is None:
            verdict = choose_guard(func, args, kwargs)
            if isinstance(verdict, Guard):
                guard = self.guards[key] = verdict
            elif verdict is False:
                self.helpless.add(address)
        return guard

    def _returned(self, func: Any, args: Any, kwargs: Any, result: Any, wide: torch.dtype) -> Any:
        """The caller's result: for an in-place op the tensor that it passed; in the narrow format if requested."""
        place = kwargs.get("out") if kwargs.get("out") is not None else args[0] if _in_place(func) and args else None
        if isinstance(place, torch.Tensor) and isinstance(result, torch.Tensor) and result is not place:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (place.is_leaf and place.requires_grad)):
                return place.copy_(_held(result, place.dtype))
        if not self._narrow:
            return result
        reduced = [t.dtype for t in tree_leaves((args, kwargs)) if _is_float(t) and t.dtype.itemsize < wide.itemsize]
        if not reduced:
            return result
        return tree_map(lambda t: _held(t, reduced[0]) if _is_float(t) else t, result)


class WrittenCasts(TorchFunctionMode):
    """Replaces the user's own casts to float16 or bfloat16 (also of numbers) by float32; autocast's casts stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function_name(func) in CASTS and cast_target(func, args, kwargs) in REDUCED:
            return args[0].to(torch.float32)
        return func(*args, **wide_numbers(func, kwargs))


def calling_line() -> Source | None:
    """The user's line that called a torch function, asked by a mode; None for a call by ampdoctor itself."""
    frame = sys._getframe(1)
    asking = frame.f_code.co_filename  # the mode's file
    while frame is not None:
        filename = frame.f_code.co_filename
        if frame.f_code is called_as_recorded.__code__:
            return as_source(recorded_line())
        passed_on = frame.f_code.co_name == "__torch_function__" or filename.startswith(_IN_BETWEEN)
        if filename.startswith(_OURS) and filename != asking and not passed_on:
            return None
        if not filename.startswith((_TORCH, _OURS, "<")):
            return as_source(user_line())
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _widened(value: Any, wide: torch.dtype) -> Any:
    """Floating-point tensors and dtypes narrower than `wide` in `wide`, differentiably."""

    def widen(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(wide) if item.is_floating_point() and item.dtype.itemsize < wide.itemsize else item
        if isinstance(item, torch.dtype) and item.is_floating_point and item.itemsize < wide.itemsize:
            return wide
        return item

    return tree_map(widen, value)


def _held(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in a narrower format, clamped to its largest number; NaN stays."""
    if tensor.dtype.itemsize <= dtype.itemsize:
        return tensor.to(dtype)
    limit = torch.finfo(dtype).max
    return tensor.clamp(-limit, limit).to(dtype)


def cast_target(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype that a cast requests; None where it cannot be read from the call."""
    named = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
    known = named.get(getattr(func, "__name__", ""))
    if known is not None:
        return known
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, torch.Tensor) and getattr(func, "__name__", "") in ("to", "type_as"):
            return value.dtype
    return None


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith("__i") if name.startswith("__") else name.endswith("_")


@contextmanager
def _no_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in _DEVICES:
            stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
            torch.set_autocast_enabled(device, False)
        yield


# -- which modules compute something themselves: the candidates for a smallest set of fp32 modules --


class OwnOps(FunctionNames):
    """Notes the modules whose own forward calls a torch function, while it is attached."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = ModuleStack()
        self._first: dict[str, int] = {}

    @property
    def modules(self) -> tuple[str, ...]:
        """Clean names, in the order of execution; a parent before its children, as fp32 there applies to them too."""
        entered: dict[str, int] = {}
        for name, order in self._first.items():
            parts = name.split(".")
            for depth in range(len(parts) + 1):
                ancestor = ".".join(parts[:depth])
                entered[ancestor] = min(entered.get(ancestor, order), order)
        return tuple(sorted(self._first, key=lambda name: (entered[name], name.count(".") + bool(name))))

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        """Watch the session's steps."""
        self._modules.clear()
        with self._modules.attach(run), self.watching():
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = self._modules.current
        if running is not None and running[0] not in self._first and calling_line() is not None:
            self._first[running[0]] = len(self._first)
        return func(*args, **(kwargs or {}))
