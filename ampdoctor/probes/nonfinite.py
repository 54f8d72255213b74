"""Whether values are finite: a cheap probe of whole steps, the headroom of fp16 and bf16 tensors, and exact checks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ampdoctor.errors import UserCodeError
from ampdoctor.evidence.location import NonFinite
from ampdoctor.evidence.trace import Headroom, NonFiniteReport, TensorStats
from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.callbacks import on_gradient
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.numerics.tensors import describe, extremes, extremes_of_all, extremes_of_each, nonfinite_counts, to_host
from ampdoctor.precision.casting import HALVES
from ampdoctor.probes.modules import is_watched, optimizer_parameters, tensors_in
from ampdoctor.probes.ops import Probe

# -- headroom: how far finite tensors stay below the largest number of their format --

FAR = 8.0  # headroom in powers of two from which on a module's largest output is no longer recorded step by step


class Tightest:
    """The smallest headroom among a step's extremes (`found`), and the outputs near their format's limit (`near`).

    A parameter's gradient counts in its module's format. -inf and the format's lowest number are masks: there only the
    upper end counts.
    """

    def __init__(self, step: int) -> None:
        self.found: Headroom | None = None
        self.near: dict[str, Headroom] = {}  # by module: its largest output within `FAR` of the limit
        self._step = step
        self._reduced: dict[str, str] = {}

    def note(self, kind: str, name: str, dtype: torch.dtype, low: float, high: float) -> None:
        """Note a tensor's smallest and largest element; the outputs of a step come before its gradients."""
        if kind == "output" and dtype in HALVES:
            self._reduced[name] = HALVES[dtype]
        module = name.rpartition(".")[0] if kind == "grad" else name
        if kind not in ("output", "output_grad", "grad") or not math.isfinite(high):
            return
        format_name = HALVES.get(dtype) or (self._reduced.get(module) if kind == "grad" else None)
        if format_name is None:
            return
        limit = FORMATS[format_name].max
        amax = abs(high) if low <= -limit else max(abs(low), abs(high))
        if not 0.0 < amax <= limit:  # only a sum of several gradients, made in float32, exceeds it
            return
        share = amax / limit
        tighter = self.found is None or share > self.found.amax / self.found.limit
        known = self.near.get(module)
        nearer = kind == "output" and share >= 2.0**-FAR and (known is None or share > known.amax / known.limit)
        if not (tighter or nearer):
            return
        headroom = Headroom(step=self._step, module=module, kind=kind, format=format_name, amax=amax, limit=limit)
        if tighter:
            self.found = headroom
        if nearer:
            self.near[module] = headroom


# -- pass 1: one cheap reduction a tensor, one for all small ones of the state, one host sync a step --
#
# It triggers only on what harms training: loss, gradients, parameters, buffers, optimizer state. Sums over module
# outputs and their gradients only locate. A sum may fire on finite values (a `finfo.min` mask sums to -inf): a firing
# is a reason to trace the step, never a finding.

_HALF_MAX = torch.finfo(torch.float16).max
_COMPARED = {"loss": "", "output": "output of", "output_grad": "output gradient of", "grad": "gradient of"}
_LOCATING = frozenset(("output", "output_grad"))  # kinds that are checked only to locate; they harm nothing themselves


class Observation(NamedTuple):
    """A value that two replays of a step are compared by."""

    kind: str  # "loss", "output", "output_grad" (of a module) or "grad" (of a parameter)
    name: str
    value: float  # the worst element: a non-finite one if there is one, else the largest

    @property
    def what(self) -> str:
        """For a sentence: "gradient of head.weight"."""
        return f"{_COMPARED[self.kind]} {self.name}".strip()


class NonFiniteProbe(Probe):
    """Detects non-finite values in every module's outputs and their gradients, in gradients, and in the run's state.

    Not counted are state that was infinite before, a mask that a step makes and keeps, and a gradient that no optimizer
    uses; a NaN in a buffer is never intended. `report`, `observed` (what replays are compared by), `headroom` (the
    tightest) and `near` are those of the step that was finished last; the last two are empty if it was not finite.
    """

    def __init__(self, *, locate: bool = True) -> None:
        self._locate = locate
        self.report = NonFiniteReport(affected=(), outputs=(), output_grads=())
        self.observed: tuple[Observation, ...] = ()
        self._before: dict[tuple[str, str], bool] = {}  # of the state: was it infinite
        self.headroom: Headroom | None = None
        self.near: tuple[Headroom, ...] = ()
        self._labels: list[tuple[str, str]] = []
        self._flags: list[tuple[torch.Tensor, torch.Tensor]] = []  # the smallest and the largest element of each
        self._leaf_hooks: list[Any] = []

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        self._run = run
        self._names = run.parameter_names()
        state = self._state(named=True)
        ends = zip(state, to_host(extremes_of_each(tensor for *_, tensor in state)), strict=True)
        self._before = {(kind, name): any(map(math.isinf, pair)) for (kind, name, _), pair in ends}  # and no NaN
        self._beside = FiniteBeside(run)
        trained = trained_parameters(run)
        with ExitStack() as stack:
            stack.callback(self._unhook_leaves)
            for name, module in run.model.named_modules() if self._locate else ():
                if (name and any(module.children())) or isinstance(module, torch.jit.ScriptModule):
                    continue  # a scripted module takes no hooks: its non-finite outputs are seen later
                clean = run.module_names.get(name, name)
                handle = module.register_forward_hook(self._on_output(clean, module), always_call=True)
                stack.callback(handle.remove)
            for parameter in run.model.parameters():
                if parameter.requires_grad and parameter.is_leaf and id(parameter) in trained:
                    name = self._names[id(parameter)]
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._on_gradient(name)).remove)
            yield

    def begin(self) -> None:
        self._labels.clear()
        self._flags.clear()
        self._beside = FiniteBeside(self._run)

    def finish(self, step: int, loss: Any) -> None:
        """Check loss and state, then read all flags at once."""
        if isinstance(loss, torch.Tensor):
            self._check("loss", "loss", loss)
        elif isinstance(loss, float):
            self._check("loss", "loss", torch.tensor(loss, dtype=torch.float64))
        place = len(self._labels)
        for name, gradient in outside_gradients(self._run):
            self._check("grad", name, gradient)
        beside = (tensor for _, tensor in self._beside.now() if is_watched(tensor))
        self._flags += extremes_of_all([*(tensor for *_, tensor in self._state(named=False)), *beside])
        self._unhook_leaves()
        tightest = Tightest(step)
        self.report = self._read(tightest, place, raised=isinstance(loss, UserCodeError))
        fired = any(not target.startswith("buffer:") for target in self.report.affected)
        self.headroom, self.near = (None, ()) if fired else (tightest.found, tuple(tightest.near.values()))

    def _state(self, *, named: bool) -> list[tuple[str, str, torch.Tensor]]:
        state = [one for one in state_tensors(self._run, named=named) if is_watched(one[2])]
        # a step count is not checked: what it divides is
        return [one for one in state if one[0] != "optimizer_state" or one[2].dim()]

    def _check(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        if is_watched(tensor):
            self._labels.append((kind, name))
            self._flags.append(extremes(tensor))

    def _on_output(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def arrived(gradient: torch.Tensor) -> None:
            self._check("output_grad", name, gradient)

        def hook(called: nn.Module, _args: Any, output: Any) -> None:
            if called is not module:
                return  # a copy of the model (an EMA's deepcopy) has copies of its hooks
            for tensor in tensors_in(output):
                self._check("output", name, tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    handle = on_gradient(tensor, arrived)
                    if tensor.is_leaf:  # the module returns a parameter: its hook outlives the graph
                        self._leaf_hooks.append(handle)

        return hook

    def _unhook_leaves(self) -> None:
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._check("grad", name, parameter.grad)

        return hook

    def _read(self, tightest: Tightest, place: int, *, raised: bool) -> NonFiniteReport:
        """Reads the flags; the last, of all that is kept, have no labels, and what is lost of it comes at `place`."""
        values = to_host(self._flags)
        lost = not all(map(math.isfinite, chain.from_iterable(values[len(self._labels) :])))
        state = self._state(named=True) if lost else []
        ends_of_state = to_host(extremes_of_each(tensor for *_, tensor in state))
        affected: dict[str, None] = {"raised": None} if raised else {}
        outputs: dict[str, None] = {}
        output_grads: dict[str, None] = {}
        observed: list[Observation] = []
        checked = zip(self._labels, self._flags, values, strict=False)
        read = [(*label, flag.dtype, *ends) for label, (flag, _), ends in checked]
        named = zip(state, ends_of_state, strict=True)
        read[place:place] = [(kind, name, tensor.dtype, *ends) for (kind, name, tensor), ends in named]
        for kind, name, dtype, low, high in read:
            value = _worst(low, high)
            if kind in _COMPARED:
                tightest.note(kind, name, dtype, low, high)
                observed.append(Observation(kind, name, value))
            if math.isfinite(value) or self._before.get((kind, name)):
                continue
            if kind == "buffer" and is_made_mask({one[1]: one[2] for one in state if one[0] == kind}[name]):
                continue
            if kind == "output":
                outputs[name] = None
            elif kind == "output_grad":
                output_grads[name] = None
            else:
                affected["loss" if kind == "loss" else f"{kind}:{name}"] = None
        affected |= {f"beside:{name}": None for name, _ in self._beside.harmed()} if lost else {}
        self.observed = tuple(observed)
        return NonFiniteReport(affected=tuple(affected), outputs=tuple(outputs), output_grads=tuple(output_grads))


def first_difference(first: Sequence[Observation], second: Sequence[Observation]) -> tuple[str, float, float] | None:
    """The first difference of two replays, in what both checked: (what, first value, second value); else None."""
    if not all(any(one.kind in _LOCATING for one in observed) for observed in (first, second)):
        first, second = ([one for one in observed if one.kind not in _LOCATING] for observed in (first, second))
    for here, there in zip(first, second, strict=False):
        if here.what != there.what:
            return f"the order of execution, at {here.what}", here.value, there.value
        if here.value != there.value and not (math.isnan(here.value) and math.isnan(there.value)):
            return here.what, here.value, there.value
    return (
        None if len(first) == len(second) else ("the number of modules that ran", float(len(first)), float(len(second)))
    )


def trained_parameters(run: ObservedRun) -> frozenset[int]:
    """`id` of each parameter that an optimizer holds; of all parameters if the run has no optimizer."""
    held = set(map(id, optimizer_parameters(run)))
    # with fp32 master weights the optimizers hold copies, which take their gradients from the model's own parameters
    own = {id(p) for p in run.model.parameters()}
    return frozenset(held if held & own else own)


def state_tensors(run: ObservedRun, *, named: bool = True) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of all state that a step changes: parameters, buffers, optimizer state; else no names."""
    names: Mapping[int, str] = run.parameter_names() if named else defaultdict(str)
    seen: set[int] = set()
    for parameter in run.model.parameters():
        seen.add(id(parameter))
        yield "param", names[id(parameter)], parameter
    for buffer_name, buffer in run.model.named_buffers():
        yield "buffer", run.clean_name(buffer_name) if named else "", buffer
    for optimizer in run.optimizers.values():
        for held in parameters_of(optimizer):
            if id(held) not in seen:
                seen.add(id(held))
                yield "param", names[id(held)], held
        for owned, values in optimizer.state.items():
            owner = names.get(id(owned), "?")
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    yield "optimizer_state", f"{owner}:{key}" if named else "", value


def outside_gradients(run: ObservedRun) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, gradient) of parameters that only an optimizer holds: fp32 master weights of half parameters."""
    inside = {id(parameter) for parameter in run.model.parameters()}
    outside = [(id(p), p.grad) for p in optimizer_parameters(run) if id(p) not in inside and p.grad is not None]
    names = run.parameter_names() if outside else {}
    yield from ((names[key], gradient) for key, gradient in outside)


def holds_nan(tensor: torch.Tensor) -> bool:
    """Whether some element is NaN: then the smallest is, too; waits for the device."""
    return math.isnan(float(extremes(tensor)[0]))


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether it holds -inf and otherwise only finite values, as a mask does and trained state does not."""
    nans, pos_infs, neg_infs = nonfinite_counts(tensor)
    return neg_infs > 0 and not nans and not pos_infs


def is_made_mask(tensor: torch.Tensor) -> bool:
    """Whether it holds -inf and otherwise only zeros."""
    return is_mask(tensor) and not bool((tensor.detach().nan_to_num(neginf=0.0) != 0).any())


def is_written_mask(copy: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a copy of weights is a mask: -inf and finite values, and no -inf in place of a weight beyond fp16.

    Scores of pruned weights look like this. A cast to half makes -inf exactly of the weights below -65504: no mask.
    `copy` has the shape of one of the model's `tensors`, or is flat and as long as all of them. Waits for the device.
    """
    if not is_mask(copy) or is_made_mask(copy):
        return is_made_mask(copy)
    lost, own = copy.detach().isneginf(), [tensor.detach() for tensor in tensors]
    own = [one for one in own if type(one) is torch.Tensor and one.device == copy.device and one.is_floating_point()]
    alike = [one for one in own if one.shape == copy.shape]
    if copy.ndim == 1 and sum(one.numel() for one in own) == len(copy):
        alike.append(torch.cat([one.reshape(-1) for one in own]))
    beyond = [one < -_HALF_MAX for one in alike]
    return not any(bool(there.any()) and bool(lost[there].all()) for there in beyond)


class FiniteBeside:
    """The tensors that the run's own code keeps beside the model and that were finite when this was made.

    A tensor is recognised by identity, or by its name if the step makes it anew (an average); a mask is not counted.
    """

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        kept = [(name, tensor) for name, tensor in run.beside() if is_watched(tensor)]
        values = to_host(extremes_of_each(tensor for _, tensor in kept))
        self._known = [one for one, value in zip(kept, values, strict=True) if math.isfinite(_worst(*value))]

    def now(self) -> Iterator[tuple[str, torch.Tensor]]:
        names, tensors = {name for name, _ in self._known}, {id(tensor) for _, tensor in self._known}
        for name, tensor in self._run.beside() if self._known else ():
            if id(tensor) in tensors or name in names:
                yield name, tensor

    def harmed(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = list(self._run.model.parameters())
        for name, tensor in self.now():
            if is_nonfinite(tensor) and not is_written_mask(tensor, own):
                yield name, tensor


def _worst(low: float, high: float) -> float:
    """The largest element; NaN or an infinity if there is one."""
    return high if math.isfinite(low) else math.nan


# -- exact checks of one tensor --


def any_nonfinite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors holds a NaN or an infinity, exactly: one reduction for each, and one sync."""
    return not all(map(math.isfinite, chain.from_iterable(to_host(extremes_of_all(filter(is_watched, tensors))))))


def is_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds a NaN or an infinity, exactly: one reduction."""
    return is_watched(tensor) and not all(math.isfinite(float(end)) for end in extremes(tensor))


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype as the report spells it ("float16")."""
    return str(tensor.dtype).removeprefix("torch.")


def stats_of(tensor: torch.Tensor) -> TensorStats:
    """Exact statistics of one tensor."""
    values = dense(tensor).detach()
    if not is_watched(values) or values.numel() == 0:
        return TensorStats(dtype=dtype_name(tensor), shape=tuple(tensor.shape), amax=0.0, nans=0, infs=0, zeros=0)
    seen = describe(values)
    return TensorStats(
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        amax=seen.finite_amax or 0.0,
        nans=seen.nans,
        infs=seen.pos_infs + seen.neg_infs,
        zeros=values.numel() - int(torch.count_nonzero(values)),
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values in a layout and a dtype that every op takes: those of a sparse tensor, 8-bit floats in float32."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def kind_of(tensors: Sequence[torch.Tensor]) -> NonFinite:
    """Returns "nan" if there is a NaN, else "inf" or "none"."""
    ends = [float(end) for t in tensors if is_watched(t) for end in extremes(t)]  # a NaN makes both NaN
    if any(map(math.isnan, ends)):
        return "nan"
    return "inf" if any(map(math.isinf, ends)) else "none"
