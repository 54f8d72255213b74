"""Interventions: the op at a birth's line runs otherwise, as it would if the user's code were changed there.

Found again by its line and its name rather than by its position in the step: a change of code reaches every call of
that line, also those of the steps after the bad one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ampdoctor.evidence.where import Source
from ampdoctor.hooks.program import called_as_recorded, recorded_line
from ampdoctor.package import FOLDER
from ampdoctor.precision.nested import REDUCED
from ampdoctor.precision.widening import wide_numbers
from ampdoctor.probes.altering.guards import Guard, choose_guard
from ampdoctor.probes.ops.naming import changes_shape, function_name, is_cast
from ampdoctor.probes.ops.sites import FunctionNames
from ampdoctor.probes.ops.source import as_source, user_line

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Birth
    from ampdoctor.evidence.where import Where

_OURS = f"{FOLDER}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_IN_BETWEEN = str(FOLDER / "precision" / "emulation" / "gpu") + os.sep
"""Through these files of ours the user's own calls go, Tensor.to and the like, and through a mode further out."""
_DEVICES = ("cpu", "cuda")
_FUNCTIONAL = ("torch.nn.functional", "torch.functional", "torch")

How = Literal["fp32", "line_fp32", "fp64", "line_fp64", "guard", "line_guard"]
"""The op, or everything on its line, in fp32, in fp64, or in fp32 with operands or results held in bounds."""


@dataclass(frozen=True, slots=True)
class Address:
    """A place in the user's code.

    Attributes:
        source: The line; of the forward op for a derivative.
        op: Name of the op without namespace, as `Where.op` has it.
    """

    source: Source
    op: str


def address_of(birth: Birth) -> Address | None:
    """Where a change of code would go for a birth; None where no line of the user's own runs its op."""
    return address_at(birth.where, after_backward=birth.after_backward)


def address_at(where: Where, *, after_backward: bool = False) -> Address | None:
    """Where a change of code would go; None where no line of the user's own runs the op (an optimizer of torch's).

    Args:
        where: The op's place.
        after_backward: It is in the user's own code behind the backward.
    """
    source = where.source or where.forward_source
    theirs = after_backward or where.phase not in ("optimizer", "scaler", "data", "checkpoint")
    if source is None or where.op is None or not theirs:
        return None
    return Address(source, where.op.partition(".")[2])


class Intervention(FunctionNames):
    """Ops at some addresses run otherwise while it is on.

    Args:
        addresses: Where.
        how: What is done there.
        narrow: Results return to the format of the inputs: where what is wide meets weights that are not.

    Attributes:
        met: The addresses that ran.
        guards: What was chosen at an address for an op, for the guards; kept, so that further runs get the same.
        helpless: The addresses where no guard helped.
    """

    def __init__(self, addresses: Sequence[Address], how: How, *, narrow: bool = False) -> None:
        super().__init__()
        self._addresses = tuple(dict.fromkeys(addresses))
        self._files = {address.source.file for address in addresses}
        self._how = how
        self._narrow = narrow
        self.met: set[Address] = set()
        self.guards: dict[tuple[Address, str], Guard] = {}
        self.helpless: set[Address] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        address = self._address(func)
        if address is None:
            return func(*args, **kwargs)
        self.met.add(address)
        if changes_shape(function_name(func)):
            return func(*args, **kwargs)  # a copy in another format would leave the user's tensor as it was
        return self._otherwise(address, func, args, kwargs)

    def _address(self, func: Callable[..., Any]) -> Address | None:
        name = function_name(func)
        if name is None and getattr(func, "__module__", None) not in _FUNCTIONAL:
            return None  # a property, a size
        source = calling_line()
        if source is None:
            return None
        return next((a for a in self._addresses if a.source == source and self._reached(a, name)), None)

    def _reached(self, address: Address, name: str | None) -> bool:
        if self._how.startswith("line") or name is None:
            return True  # a function written in Python, in which the op runs unseen
        if is_cast(address.op):
            return True  # autocast's own cast, inside whichever op the line has
        return name == address.op or name.rstrip("_") == address.op.rstrip("_")

    def _otherwise(self, address: Address, func: Any, args: Any, kwargs: Any) -> Any:
        guarded = self._how.endswith("guard")
        wide = torch.float64 if self._how.endswith("fp64") else torch.float32
        name = function_name(func) or ""
        target = cast_target(func, args, kwargs) if is_cast(name) else None
        if target is not None and target.itemsize < wide.itemsize and not guarded:
            return args[0].to(wide)  # a cast to less is what must not be
        inputs, keywords = (args, kwargs) if target is not None else (_widened(args, wide), _widened(kwargs, wide))
        with _no_autocast():
            if guarded:
                guard = self._guard(address, func, inputs, keywords)
                result = guard.run(func, inputs, keywords) if guard is not None else func(*inputs, **keywords)
            else:
                result = func(*inputs, **keywords)
        return self._returned(func, args, kwargs, result, wide)

    def _guard(self, address: Address, func: Any, args: Any, kwargs: Any) -> Guard | None:
        key = address, function_name(func) or ""  # a line that is reached for a cast has other ops as well
        guard = self.guards.get(key)
        if guard is None:
            verdict = choose_guard(func, args, kwargs)
            if isinstance(verdict, Guard):
                guard = self.guards[key] = verdict
            elif verdict is False:
                self.helpless.add(address)
        return guard

    def _returned(self, func: Any, args: Any, kwargs: Any, result: Any, wide: torch.dtype) -> Any:
        """What the caller gets: in place, the tensor it gave; the narrow format where that is asked for."""
        place = kwargs.get("out") if kwargs.get("out") is not None else args[0] if _in_place(func) and args else None
        if isinstance(place, torch.Tensor) and isinstance(result, torch.Tensor) and result is not place:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (place.is_leaf and place.requires_grad)):
                return place.copy_(_held(result, place.dtype))
        if not self._narrow:
            return result
        reduced = [t.dtype for t in _floats((args, kwargs)) if t.dtype.itemsize < wide.itemsize]
        if not reduced:
            return result
        return tree_map(lambda t: _held(t, reduced[0]) if _is_float(t) else t, result)


class WrittenCasts(TorchFunctionMode):
    """What the user's code casts to float16 or bfloat16, or makes of numbers so, is float32; autocast's casts stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_cast(function_name(func) or "") and cast_target(func, args, kwargs) in REDUCED:
            return args[0].to(torch.float32)
        return func(*args, **wide_numbers(func, kwargs))


def calling_line() -> Source | None:
    """The user's line that called a torch function; None for one that ampdoctor called itself (a probe's hook).

    For the `__torch_function__` of a mode, or what that calls in its own file.
    """
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


def _floats(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda item: found.append(item) if _is_float(item) else None, value)
    yield from found


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
    """In a narrower format, as far as its largest number; NaN stays."""
    if tensor.dtype.itemsize <= dtype.itemsize:
        return tensor.to(dtype)
    limit = torch.finfo(dtype).max
    return tensor.clamp(-limit, limit).to(dtype)


def cast_target(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """The format that a cast asks for; None where it cannot be read from the call."""
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
