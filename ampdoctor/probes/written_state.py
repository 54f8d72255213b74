"""State that a step writes: by which op, and which forwards use a half copy from before a write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.evidence.location import Where
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.precision.casting import REDUCED
from ampdoctor.probes.modules import memory_of, tensors_in
from ampdoctor.probes.ops import UNINITIALISED, OpProbe, Site, kernel_name, reshapes, split_calls, written

# -- ops that write a run's state: the last one of a step determines the value --


@dataclass(frozen=True, slots=True)
class Write:
    """An op whose result lies in a tensor's memory."""

    site: Site
    norm: float | None  # of the result; None outside of an optimizer's phase
    zeros: float | None  # share of zero elements, likewise
    in_place: bool  # the memory was the tensor's before; else the op allocated or reused it


def last_written(writes: Sequence[Write], step: int) -> Where | None:
    """The site of the op that wrote a tensor last in a step, where it ran first; `writes` in the order of the ops."""
    last = next((write.site for write in reversed(writes)), None)
    same = (write.site for write in writes if last and (write.site.op, write.site.line) == (last.op, last.line))
    return next((site.where(step, "none") for site in same), None)


class WritesProbe(OpProbe):
    """Notes the ops that write the tensors of `named()`, in `writes`; `draws`: an update drew random numbers."""

    def __init__(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        super().__init__()
        self.writes: Mapping[str, list[Write]] = {}
        self.draws = False
        self._named = named
        self._by_memory: defaultdict[tuple[int, int], list[Write]] = defaultdict(list)

    def begin(self) -> None:
        self._by_memory.clear()
        self.draws = False

    def finish(self, step: int, loss: Any) -> None:
        """Assign the writes to the tensors by their memory."""
        super().finish(step, loss)
        self.writes = {name: self._by_memory.get(_memory(tensor), []) for name, tensor in self._named()}
        self._by_memory.clear()

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        kernel = kernel_name(func)
        nested = any(tensor.is_nested for tensor in tensors_in([*args, *kwargs.values()]))
        if nested or kernel in UNINITIALISED:
            return func(*args, **kwargs)
        calls = split_calls(func, args, kwargs)
        result = func(*args, **kwargs)
        updates = site.phase == "optimizer"
        self.draws |= updates and torch.Tag.nondeterministic_seeded in func.tags
        for call in calls:
            own = {id(tensor) for tensor in call.writes}
            for tensor in call.results(result):
                values = tensor.detach() if updates and tensor.numel() else None
                norm = None if values is None else float(values.double().norm())
                zeros = None if values is None else float((values == 0).double().mean())
                self._by_memory[_memory(tensor)].append(Write(site, norm, zeros, id(tensor) in own))
        return result


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


# -- forwards that use an outdated half copy of a weight, e.g. one in autocast's cache --


@dataclass(slots=True)
class _Copy:
    copy: torch.Tensor  # held, so that its memory is not reused during the step
    weight: torch.Tensor
    memory: int  # address of the weight's values at the cast
    written: Site | None = None  # the op that wrote them since

    @property
    def replaced(self) -> bool:
        """Whether the weight has other memory now (`p.data = values`), which no op shows."""
        return self.weight.data_ptr() != self.memory


@dataclass(frozen=True, slots=True)
class OldCast:
    """A forward op (`use`) that read a copy of a weight's old values."""

    weight: str
    use: Site
    written: Site | None  # the op that wrote the weight after the cast; None where `p.data` was replaced


class OldCastsProbe(OpProbe):
    """Notes forward ops that read half copies of weights which have other values now, once a weight."""

    takes_apart = False

    def __init__(self) -> None:
        super().__init__()
        self.found: list[OldCast] = []
        self._by_memory: dict[int, _Copy] = {}
        self._of_weight: defaultdict[int, list[_Copy]] = defaultdict(list)
        self._names: dict[int, str] = {}

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        with super().attach(run):
            self._names = dict(run.parameter_names())
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        self.found = []
        try:
            with super().during(step):
                yield
        finally:
            self._by_memory.clear()
            self._of_weight.clear()

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if site.phase != "backward":
            self._reads(site, args, kwargs)
        result = func(*args, **kwargs)
        if kernel_name(func) == "_to_copy":
            self._casts(args[0], result)
        elif func._schema.is_mutable and not reshapes(func):
            for tensor in written(func, args, kwargs):
                for known in self._of_weight.get(memory_of(tensor), ()):
                    known.written = known.written or site
        return result

    def _casts(self, weight: torch.Tensor, copy: Any) -> None:
        """Note autocast's copies: it keeps those of fp32 leaves that need a gradient, and no others."""
        named = id(weight) in self._names and copy.dtype in REDUCED
        if not (named and memory_of(weight) and memory_of(copy)):
            return
        known = _Copy(copy, weight, weight.data_ptr())
        self._by_memory[memory_of(copy)] = known
        self._of_weight[memory_of(weight)].append(known)

    def _reads(self, site: Site, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in([*args, *kwargs.values()]) if self._by_memory else ():
            known = self._by_memory.get(memory_of(tensor))
            if known is None or not (known.written or known.replaced):
                continue
            name = self._names[id(known.weight)]
            if not any(old.weight == name for old in self.found):
                self.found.append(OldCast(name, site, known.written))
