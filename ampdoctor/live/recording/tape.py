"""Recording outside the models: torch functions, buffers before a call, and whether an error is about numbers."""

from __future__ import annotations

import itertools
import math
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ampdoctor.hooks.callbacks import READS
from ampdoctor.hooks.interfaces import causes_of, harmless_until
from ampdoctor.hooks.json_values import name_of
from ampdoctor.hooks.nested import iter_tensors, map_tensors
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.hooks.program import InputRef, Instruction, Mode, Op, ParamRef, Reference, ResultRef, references, results
from ampdoctor.hooks.torch_internals import FunctionMode, put_outermost, replaced, take_away, unseen, version_of
from ampdoctor.numerics.tensors import is_plain
from ampdoctor.probes.user_code import user_line

_DRAWS = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "exponential_", "uniform_", "rrelu")
"""Parts of the names of torch's functions that draw random numbers."""
_PICKING = ("__getitem__", "index_select", "select", "narrow", "gather", "take", "split", "chunk", "unbind", "unfold")
"""Functions that take a part of a tensor: of data, only that part is kept, not the whole tensor."""
_GRADIENT: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # a gradient that enters a loss is given
_KINDS = ("cpu", "cuda")
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.Size)


_harmless = harmless_until("has_failed", "fail")


class Links(NamedTuple):
    """The numbers of the tensors that an instruction makes, and of those that it takes, in order."""

    made: list[int]
    results: list[int]  # taken, made by others
    given: list[int]  # taken, from outside


def links_of(instruction: Instruction) -> Links:
    """Returns the numbers of the tensors that an instruction makes and takes."""
    links = Links([made.index for made in results(instruction)], [], [])
    for one in references(instruction):
        if isinstance(one, ResultRef):
            links.results.append(one.index)
        elif isinstance(one, InputRef):
            links.given.append(one.index)
    return links


class Tape:
    """A loop's instructions, and its tensors' names; functions are observed from a model's return to a backward."""

    def __init__(
        self,
        recorded: Callable[[Op, Links], None],
        failed: Callable[[Exception], None],
        asked: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        self._recorded, self._failed, self._asked = recorded, failed, asked
        self.has_failed = False
        self.instructions: list[Instruction] = []  # oldest first
        self.given: dict[int, torch.Tensor] = {}  # the tensors from outside, by the index of their `InputRef`
        self.held_bytes = 0  # of the given tensors
        self.grad: set[int] = set()  # the numbers of the made tensors that require a gradient
        self._versions: dict[int, int] = {}
        self._given_by_id: dict[int, tuple[torch.Tensor, int]] = {}
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], ResultRef]] = {}
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self._held: dict[int, tuple[weakref.ref[torch.Tensor], ParamRef]] = {}
        self.names: dict[int, str] = {}  # of parameters and buffers, by their id
        self._next = 0
        self._known: dict[Any, tuple[bool, bool, bool, bool]] = {}
        self._links: Links | None = None  # of the function that is being recorded
        self._mode = FunctionMode(self.function)
        self._open: int | None = None  # the recorded thread: each thread has its own modes

    # -- names -------------------------------------------------------------------------------------------------------

    def hold(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sets the names of parameters and buffers."""
        self._held = {id(tensor): (weakref.ref(tensor), ParamRef(name)) for name, tensor in named}
        self.names = {key: reference.name for key, (_, reference) in self._held.items()}

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters and buffers that still live, with their names."""
        for there, reference in self._held.values():
            tensor = there()
            if tensor is not None:
                yield reference.name, tensor

    def parameters(self, ids: Iterable[int]) -> tuple[ParamRef, ...]:
        """Returns the references of those parameters and buffers that are known, by the `id`s of living tensors."""
        held = map(self._held.get, ids)
        return tuple([entry[1] for entry in held if entry is not None and entry[0]() is not None])

    def reference(self, tensor: torch.Tensor) -> Reference:
        """Returns the reference of a tensor; a tensor that is seen for the first time is given."""
        key = id(tensor)
        made = self._made.get(key)
        if made is not None and made[0]() is tensor:
            if self._links is not None:
                self._links.results.append(made[1].index)
            return made[1]
        held = self._held.get(key)
        if held is not None and held[0]() is tensor:
            return held[1]
        known = self._given_by_id.get(key)
        if known is None:
            index = self._next
            self._next += 1
            self.given[index], self._versions[index] = tensor, version_of(tensor)
            self.held_bytes += _bytes_of(tensor)
            self._given_by_id[key] = known = (tensor, index)
        if self._links is not None:
            self._links.given.append(known[1])
        return InputRef(known[1])

    def references(self, value: Any) -> Any:
        """Returns the value with its tensors replaced by their references."""
        if isinstance(value, torch.Tensor):
            return self.reference(value)
        if isinstance(value, _PLAIN):
            return value
        if type(value) in (tuple, list):  # most arguments; the general walk costs ten times as much
            return type(value)([self.references(item) for item in value])
        if type(value) is dict:
            return {key: self.references(item) for key, item in value.items()}
        return map_tensors(self.reference, value)  # type: ignore[arg-type]  # references replace tensors

    def make(self, output: Any) -> dict[str, ResultRef]:
        """Numbers the tensors in what an instruction returned; by their path."""
        return {path: self._make(tensor) for path, tensor in iter_tensors(output)}

    def _make(self, tensor: torch.Tensor) -> ResultRef:
        made = ResultRef(self._next)
        self._next += 1
        self._tensors[made.index] = there = weakref.ref(tensor)
        self._made[id(tensor)] = there, made
        if tensor.requires_grad:
            self.grad.add(made.index)
        return made

    def lives(self, index: int) -> torch.Tensor | None:
        """Returns the tensor with this number, as long as the loop holds it."""
        there = self._tensors.get(index)
        return None if there is None else there()

    def lives_on(self, made: Iterable[int]) -> bool:
        """Whether the loop holds one of the tensors with these numbers, and may run a backward through it."""
        for index in made:
            there = self._tensors.get(index)
            if there is not None and (tensor := there()) is not None and tensor.requires_grad:
                return True
        return False

    def is_changed(self, index: int) -> bool:
        """Whether a given tensor was written to since it was taken."""
        return version_of(self.given[index]) != self._versions[index]

    def is_live(self, tensor: Any) -> bool:
        """Whether a tensor is the result of an instruction, a parameter or a buffer."""
        made = self._made.get(id(tensor))
        if made is not None and made[0]() is tensor:
            return True
        held = self._held.get(id(tensor))
        return held is not None and held[0]() is tensor

    # -- the tape ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts recording functions on this thread."""
        if not self.is_open:
            take_away(self._mode)  # another thread was recorded since
            self._open = threading.get_ident()
            put_outermost(self._mode)

    def close(self) -> None:
        """Stops recording; a function that is running now is still recorded."""
        if take_away(self._mode) and self.is_open:
            self._open = None

    @property
    def is_open(self) -> bool:
        """Whether this thread's functions are recorded."""
        return self._open == threading.get_ident()

    def keep(self, instructions: list[Instruction], made: set[int], given: set[int]) -> None:
        """Forgets everything but these instructions, what they have made, and what is given to them, by its number."""
        self.instructions = instructions
        self.given = {index: tensor for index, tensor in self.given.items() if index in given}
        self.held_bytes = sum(map(_bytes_of, self.given.values()))
        self._versions = {index: self._versions[index] for index in self.given}
        self._given_by_id = {id(tensor): (tensor, index) for index, tensor in self.given.items()}
        # other live tensors are given now
        self._made = {
            key: entry for key, entry in self._made.items() if entry[1].index in made and entry[0]() is not None
        }
        self._tensors = {index: there for index, there in self._tensors.items() if there() is not None}
        self.grad &= made

    def function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function of torch's, and records it where it uses tensors of the tape."""
        if self._open != threading.get_ident() or function == _GRADIENT:
            return function(*args, **kwargs)
        known = self._known.get(function)
        if known is None:
            known = self._known[function] = _known(function)
        writes, draws, repeatable, reads = known
        if not self._is_about_us(args, kwargs) and not (
            # arithmetic on data, which may be part of a loss
            repeatable
            and not writes
            and torch.is_grad_enabled()
            and any(isinstance(value, torch.Tensor) for value in args)
        ):
            if writes and args and (given := self._given_by_id.pop(id(args[0]), None)) is not None:
                copy = args[0].detach().clone()  # the recorded instructions took its value from before the write
                copy.requires_grad_(args[0].requires_grad and args[0].is_leaf)
                self.given[given[1]], self._versions[given[1]] = copy, version_of(copy)
            return function(*args, **kwargs)
        random = RandomState.capture() if draws else None
        result = function(*args, **kwargs)
        if reads:
            if not (isinstance(result, float) and isfinite(result)):
                self._asked(args[0])
        elif writes or isinstance(result, torch.Tensor | tuple | list | dict):
            self._called(function, args, kwargs, result, random, writes=writes)
        return result

    def fail(self, error: Exception) -> None:
        """Ends the recording because of this error."""
        self.has_failed = True
        self._failed(error)

    @_harmless
    def _called(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        random: RandomState | None,
        *,
        writes: bool,
    ) -> None:
        # a function may return its argument, which then gets a new number: so the arguments come first
        links = self._links = Links([], [], [])
        args, kwargs = self.references(args), self.references(kwargs) if kwargs else {}
        self._links = None
        made = {"": self._make(result)} if isinstance(result, torch.Tensor) else self.make(result)
        if made or writes:
            links.made.extend([one.index for one in made.values()])
            mode, line = mode_now(), user_line()
            self._recorded(
                Op(function=function, args=args, kwargs=kwargs, results=made, mode=mode, random=random, line=line),
                links,
            )

    def _is_about_us(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.Tensor):
                if self.is_live(value):
                    return True
            elif isinstance(value, list | tuple) and any(
                isinstance(item, torch.Tensor) and self.is_live(item) for item in value
            ):
                return True
        return False


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def mode_now() -> Mode:
    """Returns torch's present autocast and gradient settings."""
    autocast = None
    for kind in _KINDS:
        if torch.is_autocast_enabled(kind):
            autocast = kind, torch.get_autocast_dtype(kind)
            break
    return _mode(autocast, torch.is_autocast_cache_enabled(), torch.is_grad_enabled())


_mode = cache(Mode)


def _known(function: Callable[..., Any]) -> tuple[bool, bool, bool, bool]:
    """Whether a function writes to its first argument, draws random numbers, is repeatable, gives a Python number."""
    name = str(getattr(function, "__name__", ""))
    writes = name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )
    repeatable = name not in _PICKING and name_of(function) is not None
    return writes, any(part in name for part in _DRAWS), repeatable, name in READS


# -- buffers before each call --


class Buffers:
    """Copies buffers, each once for each time that it was written to."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}  # by id: version, copy

    def watch(self, model: nn.Module) -> None:
        """Sets the model whose buffers are copied, under their names in it."""
        self._modules = [(name, weakref.ref(part)) for name, part in model.named_modules() if _own(part)]

    def now(self) -> dict[str, torch.Tensor]:
        """Returns the buffers' present values, by name."""
        found: dict[str, torch.Tensor] = {}
        for module_name, there in self._modules:
            module = there()
            silent = module is not None and module.training and isinstance(module, _NormBase)
            for last, buffer in () if module is None else _own(module).items():
                if buffer is None:
                    continue
                known = self._copies.get(id(buffer))
                version = version_of(buffer)
                # batch norm's kernel writes to its buffers without a new version
                if silent or known is None or known[0]() is not buffer or known[1] != version:
                    known = weakref.ref(buffer), version, buffer.detach().clone()
                    self._copies[id(buffer)] = known
                found[f"{module_name}.{last}" if module_name else last] = known[2]
        return found


def _own(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Returns the buffers that a module has registered itself; `buffers()` walks its children too, which is slow."""
    return module._buffers  # noqa: SLF001


# -- functions of torch that have no hook, and are patched --


@contextmanager
def around_each(owners: Iterable[Any], name: str, around: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Hands each call of the owners' function of this name, with its first argument, to `around`, which makes it."""
    to: Callable[[Any, Callable[[], Any]], Any] | None = around
    with ExitStack() as stack:
        for owner in owners:
            original = getattr(owner, name)

            def called(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if to is None:
                    return _original(*args, **kwargs)
                return to(args[0] if args else None, partial(_original, *args, **kwargs))

            stack.enter_context(replaced(owner, name, wraps(original)(called)))
        try:
            yield
        finally:
            to = None


# -- errors that end a step --

_ABOUT_NUMBERS = re.compile(
    r"\b(nan|nans|inf|infs|infinity|infinite|nonfinite|finite|overflow(s|ed)?|diverged?|probability|cholesky)\b"
    r"|invalid (numeric|values?)|numeric(al)?ly|constraint|positive-definite|singular|converge",
    re.IGNORECASE,
)
"""Words in errors about non-finite numbers from torch, SciPy, NumPy and loops: `torch.multinomial`,
`torch.distributions`, `linear_sum_assignment`, `torch.linalg`, and checks by hand."""
_MOST = 64
"""Items of a list or a dict that are searched."""


def is_about_numbers(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is an ArithmeticError or mentions numbers."""
    return any(
        isinstance(one, ArithmeticError) or _ABOUT_NUMBERS.search("".join(traceback.format_exception_only(one)))
        for one in causes_of(error)
    )


def holds_nonfinite(error: BaseException) -> bool:
    """Whether a variable in the frames of an error holds a tensor with NaN or +Inf. Waits for a device."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_locals is frame.f_globals:  # a script's globals: the tape has the relevant ones
            continue
        for value in list(frame.f_locals.values()):
            inner = value.values() if isinstance(value, dict) else value
            inner = inner if isinstance(value, dict | list | tuple) else (value,)
            tensors = (one for one in itertools.islice(inner, _MOST) if isinstance(one, torch.Tensor))
            if any(is_lost(tensor, signed=False) for tensor in tensors):
                return True
    return False


def is_lost(tensor: torch.Tensor, *, signed: bool) -> bool:
    """Whether a tensor holds NaN or +Inf; with `signed`, -Inf, which masks contain, counts as well."""
    if not is_plain(tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or not tensor.numel():
        return False
    with unseen():
        low, high = torch.aminmax(tensor.detach())
        return not bool(high < math.inf) or (signed and not bool(low.isfinite()))
