"""One op as it runs: its name, where it runs, and what it reads, writes and returns."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampdoctor.evidence.location import NonFinite, Phase, Where
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.hooks.torch_internals import (
    Backward,
    current_node,
    in_backward,
    seen_backwards,
    sequence_number,
    sequence_of,
)
from ampdoctor.probes.modules import ModuleStack, is_watched, takes_apart, tensors_in
from ampdoctor.probes.user_code import applied_line, as_source, hook_line, user_line

# -- names of ops as users know them --

_OPERATORS = {
    **{f"r{name}": name for name in ("add", "mul", "pow", "matmul")},
    **{f"i{name}": f"{name}_" for name in ("add", "sub", "mul", "pow", "div")},
    **dict.fromkeys(("truediv", "rdiv", "rtruediv", "divide", "true_divide"), "div"),
    "itruediv": "div_",
    "floordiv": "floor_divide",
    "cross_entropy": "cross_entropy_loss",
    "multiply": "mul",
    "subtract": "sub",
}
CASTS = frozenset({"_to_copy", "copy_", "to", "half", "float", "bfloat16", "double", "type", "type_as"})
"""Kernels and methods that only change the dtype."""
UNINITIALISED = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"),
        *("resize_as_", "_resize_output_"),
    }
)
"""Kernels whose results are uninitialised memory: never an origin, and not checked."""
LAYOUTS = frozenset({"as_strided", "as_strided_", "_reshape_alias", "set_", "set", "view.dtype"})
"""Ops that read memory as it lies: on a copy in another format they read other elements and cannot be run again."""
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
"""In-place kernels that do not read what they overwrite."""
FILLS_A_PART = frozenset({"index_put_", "_index_put_impl_", "index_copy_", "scatter_", "masked_scatter_"})
"""In-place kernels that write some elements and do not read the others; `accumulate` or `reduce` makes them read."""
CONSTANTS = frozenset(
    {
        *("fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "scalar_tensor", "lift_fresh"),
        *("lift_fresh_copy", "where", "index_fill", "index_fill_", "constant_pad_nd"),
    }
)
"""Kernels that write a number that the user gave: an infinity there is intended."""
PICKS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})  # kernels that add up one class's value of each row
SUMS = frozenset({"sum", "mean", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "linalg_vector_norm"}) | PICKS
"""Kernels that add up what they read: an infinity that is a mask elsewhere counts there like any other number."""


def function_name(function: Callable[..., Any]) -> str | None:
    """The aten name of a torch function or method ("linear", "mul"); None where it is no aten op."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or name in ("__get__", "__set__"):
        return None
    bare = name.strip("_") if name.startswith("__") else name
    bare = _OPERATORS.get(bare, bare)
    return bare if is_aten(bare) or bare in CASTS else None


def torch_name(op: str) -> str:
    """The function that a user calls for an aten op without namespace ("torch.log"); "aten.x" where there is none."""
    bare = {"cross_entropy_loss": "cross_entropy"}.get(op, op)
    homes = {"torch": torch, "torch.nn.functional": torch.nn.functional, "Tensor": torch.Tensor}
    return next((f"{home}.{bare}" for home, within in homes.items() if hasattr(within, bare)), f"aten.{op}")


@lru_cache(maxsize=4096)
def is_aten(name: str) -> bool:
    """Whether there is an ATen op of this name."""
    return hasattr(torch.ops.aten, name)


def kernel_name(overload: Any) -> str:
    """The name of an ATen overload without namespace and overload ("addmm", "mul_")."""
    name = str(overload.__name__).partition(".")[0]
    return name.removeprefix("_foreach_")


def reshapes(overload: Any) -> bool:
    """Whether the op changes a tensor's shape in place, and no value (`transpose_`, `squeeze_`, `set_`)."""
    return torch.Tag.inplace_view in getattr(overload, "tags", ())


@lru_cache(maxsize=1024)
def changes_shape(name: str | None) -> bool:
    """Whether the torch function of this name `reshapes`."""
    packet = getattr(torch.ops.aten, name, None) if name is not None else None
    return packet is not None and any(reshapes(getattr(packet, each)) for each in packet.overloads())


def reads_layout(overload: Any) -> bool:
    """Whether the op is one of `LAYOUTS`."""
    return kernel_name(overload) in LAYOUTS or str(overload.__name__) in LAYOUTS


# -- where an op runs: in a backward, module and line are those of the forward op --

Line = tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Site:
    """Where an op ran, cheaper to make than a `Where`."""

    phase: Phase
    module: str  # "" outside
    call: int  # which call of the module
    op: str  # user-level name without namespace
    line: Line  # the user's line
    forward_line: Line = None  # in a backward, the line of the forward op
    micro_batch: int = 0
    recompute: bool = False  # run again by activation checkpointing
    sequence: int | None = None  # autograd's number of the forward op; None where autograd does not record it
    applied: Line = None  # of the first op in a custom autograd function, whose node has its number: who called that
    after_backward: bool = False  # the user's own code after the backward, outside every optimizer

    def where(self, step: int, nonfinite: NonFinite, tensor: str | None = None) -> Where:
        """The site as a `Where` of the report."""
        return Where(
            step=step,
            micro_batch=self.micro_batch,
            phase=self.phase,
            module=self.module,
            call=self.call,
            op=f"aten.{self.op}",
            nonfinite=nonfinite,
            recompute=self.recompute,
            tensor=tensor,
            source=as_source(self.line),
            forward_source=as_source(self.forward_line),
        )


class FunctionNames(TorchFunctionMode):
    """The torch functions that are running, innermost last: the names that users know ops by."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        depth = len(self.running)
        if name is not None:
            self.running.append(name)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            del self.running[depth:]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Switch the mode on, also inside a backward: a checkpointed forward that runs again there has names too."""

        def named(_backward: Backward, run: Callable[[], Any]) -> Any:
            kept, self.running = self.running, []
            try:
                with self:
                    return run()
            finally:
                self.running = kept

        with self, seen_backwards(named):
            yield


class Sites:
    """Gives the site of each op of a step."""

    def __init__(self) -> None:
        self.modules = ModuleStack()
        self.functions = FunctionNames()
        self._by_sequence: dict[int, Site] = {}
        self._order: list[int] = []
        self._after_backward = False
        self._micro_batch = 0

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        self._run = run
        self._names = run.parameter_names()
        with self.modules.attach(run):
            yield
        del self._run  # which holds the model

    def clear(self) -> None:
        self._by_sequence.clear()
        self._order.clear()
        self.modules.clear()
        self.functions.running.clear()
        self._after_backward = False
        self._micro_batch = 0

    def of(self, kernel: str) -> Site:
        """The site of the op being dispatched; a forward op is remembered under its autograd sequence number."""
        part = self._run.events.part
        running = self.modules.current
        backward = in_backward()
        if backward and running is None:
            self._after_backward = True
            return self._backward_site(kernel)
        if part is not None and not backward:
            return self._outside(kernel, "optimizer" if part == "optimizer" else "scaler")
        if self._run.micro_batch != self._micro_batch:
            self._micro_batch, self._after_backward = self._run.micro_batch, False
        if running is None:
            site = self._remember(self._outside(kernel, "loss"))
            # an op that autograd records leads to a loss, also after an inner backward (a gradient penalty)
            self._after_backward = self._after_backward and site.sequence is None
            return replace(site, phase="optimizer", after_backward=True) if self._after_backward else site
        self._after_backward = self._after_backward and backward
        name, call = running
        site = Site("forward", name, call, self._op(kernel), user_line(), None, self._run.micro_batch, backward)
        return self._remember(site)

    def _op(self, kernel: str) -> str:
        running = self.functions.running
        name = kernel
        if running:
            name = running[-1]
        elif is_aten(public := kernel.lstrip("_")):  # the op that a kernel with a leading underscore implements
            name = public
        # a cast is an op of its own, whether autocast inserts it or the user calls half() or to()
        return kernel if kernel == "_to_copy" else name.removeprefix("_foreach_")

    def _outside(self, kernel: str, phase: Phase) -> Site:
        return Site(phase, "", 0, self._op(kernel), user_line(), None, self._run.micro_batch)

    def _remember(self, site: Site) -> Site:
        sequence = sequence_number()
        # only an op that autograd records advances the counter
        if not self._order or sequence > self._order[-1]:
            self._order.append(sequence)
            applied = None if torch.is_grad_enabled() else applied_line()
            site = self._by_sequence[sequence] = replace(site, sequence=sequence, applied=applied)
        return site

    def _backward_site(self, kernel: str) -> Site:
        node = current_node()
        if node is None:
            return Site("backward", "", 0, self._op(kernel), user_line(), None, self._run.micro_batch)
        variable = getattr(node, "variable", None)
        if variable is not None:
            owner = self._names.get(id(variable), "").rpartition(".")[0]
            hook = hook_line()
            op = self._op(kernel) if hook is not None else "accumulate_grad"
            return Site("backward", owner, 0, op, hook, None, self._run.micro_batch)
        forward = self._forward_of(sequence_of(node))
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if forward is None:
            return Site("backward", "", 0, self._op(kernel), user_line(), None, self._run.micro_batch)
        if torch.is_grad_enabled():  # nodes of a second backward: they derive from the same forward op
            sequence = sequence_number()
            if sequence > self._order[-1]:
                self._order.append(sequence)
                self._by_sequence[sequence] = forward
        line = user_line() if custom else hook_line()
        return replace(
            forward,
            phase="backward",
            forward_line=forward.applied or forward.line if custom else forward.line,
            line=line,
            op=self._op(kernel) if line is not None else forward.op,
            recompute=False,
        )

    def _forward_of(self, sequence: int) -> Site | None:
        site = self._by_sequence.get(sequence)
        if site is None:
            # further nodes that an op makes (views, in-place rebasing) belong to the op before them
            place = bisect.bisect_right(self._order, sequence)
            site = self._by_sequence[self._order[place - 1]] if place else None
        return site


# -- what an op reads, writes and returns --

_RUNNING = ("running_mean", "running_var")
_UNDECLARED_WRITES = {"native_batch_norm": _RUNNING, "cudnn_batch_norm": _RUNNING, "miopen_batch_norm": _RUNNING}
"""Kernels that update tensors in place although their schema does not say so (torch 2.13, `native_functions.yaml`)."""


@dataclass(frozen=True, slots=True)
class Split:
    """One op call, or one element of a call over lists of tensors (`_foreach_`)."""

    reads: tuple[torch.Tensor, ...]  # floating-point tensors whose values the op reads
    before: tuple[torch.Tensor, ...]  # the same, with the values from before the op ran, as in `args` and `kwargs`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: tuple[torch.Tensor, ...]  # floating-point tensors that the op changes in place
    element: int | None  # index in the lists; None for a call in one piece
    repeatable: bool  # the call can be run again on `args` and `kwargs`
    places: tuple[int | str, ...] = ()  # positions (or names) of the arguments that are written
    reshapes: bool = False  # an in-place change of shape: a view, which writes nothing

    @property
    def in_place(self) -> bool:
        """Whether the op wrote into memory that existed before."""
        return bool(self.writes)

    def results(self, result: Any) -> list[torch.Tensor]:
        """The floating-point tensors that hold the call's results: those written in place, then those returned."""
        if self.element is not None:
            returned = result[self.element] if isinstance(result, list | tuple) and len(result) > self.element else ()
        else:
            returned = result
        written = {id(t) for t in self.writes}
        return [*self.writes, *(t for t in tensors_in(returned) if is_watched(t) and id(t) not in written)]

    def again(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Run the call on other arguments of the same structure; the results are parallel to `results`."""
        returned = func(*args, **kwargs)
        bound = [args[place] if isinstance(place, int) else kwargs[place] for place in self.places]
        written = [t for value in bound for t in tensors_in(value) if is_watched(t)]
        known = {id(t) for t in written}
        return [*written, *(t for t in tensors_in(returned) if is_watched(t) and id(t) not in known)]

    def substituted(self, substitute: Callable[[torch.Tensor], torch.Tensor | None]) -> Split:
        """The same call with each tensor replaced by `substitute(tensor)`, unless that is None."""
        originals = {id(b): r for b, r in zip(self.before, self.reads, strict=True)}

        def swap(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            other = substitute(originals.get(id(item), item))
            return item if other is None else other

        return replace(self, args=tree_map(swap, self.args), kwargs=tree_map(swap, self.kwargs))


@dataclass(frozen=True, slots=True)
class Ran:
    """An op that ran."""

    func: Any
    kernel: str  # without namespace and overload
    site: Site
    call: Split
    bad: list[torch.Tensor]  # inputs that were non-finite before the op ran
    results: list[torch.Tensor]  # floating-point only
    returned: Any = None  # everything, integers and booleans as well; None for one element of a list


def split_calls(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Split]:
    """Split a call of an ATen overload before it runs; those in `OVERWRITES` do not read what they write."""
    overwrites = kernel_name(func) in OVERWRITES
    named = _bind(func, args, kwargs)
    written = [name for name, is_write, _ in named if is_write]
    lists = [value for _, _, value in named if _is_tensor_list(value)]
    if lists and (written or func.__name__.startswith("_foreach_")) and len({len(v) for v in lists}) == 1:
        return [_element(named, index) for index in range(len(lists[0]))]
    copies: dict[int, torch.Tensor] = {}
    shape_alone = reshapes(func)
    writes = [t for _, is_write, value in named if is_write for t in tensors_in(value) if is_watched(t)]
    if shape_alone:
        copies = {id(t): t.detach() for t in writes}  # aliases keep the shape
    elif not overwrites:
        copies = {id(t): t.detach().clone() for t in writes}
    skip = {id(t) for t in writes} if not shape_alone and (overwrites or "out" in written) else set()
    reads = tuple(t for t in tensors_in([*args, *kwargs.values()]) if is_watched(t) and id(t) not in skip)

    def before(item: Any) -> Any:
        return copies.get(id(item), item) if isinstance(item, torch.Tensor) else item

    return [
        Split(
            reads=tuple(before(t) for t in reads) if shape_alone else reads,
            before=tuple(before(t) for t in reads),
            args=tree_map(before, tuple(args)),
            kwargs=tree_map(before, dict(kwargs)),
            writes=() if shape_alone else tuple(writes),
            element=None,
            repeatable="out" not in written and not reads_layout(func),
            places=tuple(
                position if position < len(args) else name
                for position, (name, is_write, value) in enumerate(named)
                if is_write and value is not None and not shape_alone
            ),
            reshapes=shape_alone,
        )
    ]


def _element(named: list[tuple[str, bool, Any]], index: int) -> Split:
    """One element: the same op over lists of one, so that it can be run again."""
    length = next(len(value) for _, _, value in named if _is_tensor_list(value))
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    kwargs: dict[str, Any] = {}
    for name, is_write, value in named:
        if value is None:
            continue  # not given: the schema's default
        if isinstance(value, list | tuple) and len(value) == length:
            kwargs[name] = [value[index]]  # lists of numbers run beside the tensors (`_foreach_div_.ScalarList`)
        elif name == "scalars" and isinstance(value, torch.Tensor):
            kwargs[name] = value[index : index + 1]
        else:
            kwargs[name] = value
        watched = [t for t in tensors_in(kwargs[name]) if is_watched(t)]
        reads += watched
        if is_write:
            writes += watched
    kept = {id(t): t.detach().clone() for t in writes}

    def before(item: Any) -> Any:
        return kept.get(id(item), item) if isinstance(item, torch.Tensor) else item

    return Split(
        reads=tuple(reads),
        before=tuple(before(t) for t in reads),
        args=(),
        kwargs=tree_map(before, kwargs),
        writes=tuple(writes),
        element=index,
        repeatable=True,
        places=tuple(name for name, is_write, value in named if is_write and value is not None),
    )


def _bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, bool, Any]]:
    """(name, written in place, value) of every argument, by the op's schema."""
    bound = []
    undeclared = _UNDECLARED_WRITES.get(func.__name__.partition(".")[0], ())
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        write = argument.alias_info is not None and argument.alias_info.is_write
        write = write or argument.name in undeclared
        bound.append((argument.name, write, value))
    return bound


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an op changes in place, by its schema."""
    yield from (t for _, is_write, value in _bind(func, args, kwargs) if is_write for t in tensors_in(value))


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(t, torch.Tensor) for t in value)


# -- base classes of the probes --


class Probe:
    """Observes a replay; a subclass overrides the parts that it needs."""

    def attach(self, run: ObservedRun) -> AbstractContextManager[None]:  # noqa: ARG002 - a subclass uses it
        return nullcontext()

    def begin(self) -> None:
        """Forget the last step."""

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - a subclass uses it
        self.begin()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:
        """End a step that returned `loss`."""


class OpProbe(Probe, TorchDispatchMode):
    """Observes the ops of the steps that run while it is attached."""

    takes_apart: ClassVar[bool] = True  # ops on tensor subclasses are seen as the ops that they consist of

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self._sites = Sites()
        self._step = 0

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        with self._sites.attach(run):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        self._sites.clear()
        self._step = step
        self.begin()
        with self, self._sites.functions.watching():
            yield

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - a subclass uses them
        self._sites.clear()

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.takes_apart and takes_apart(types, (args, kwargs)):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            return self.on_op(self._sites.of(kernel_name(func)), func, args, kwargs)
