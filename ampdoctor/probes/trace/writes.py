"""Which ops write what a run keeps: the last of a step is the one whose result is there afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.probes.ops.arguments import split_calls
from ampdoctor.probes.ops.naming import OVERWRITES, UNINITIALISED, kernel_name
from ampdoctor.probes.ops.sites import Site, Sites
from ampdoctor.probes.ops.tensors import takes_apart, tensors_in

if TYPE_CHECKING:
    from ampdoctor.evidence.where import Where
    from ampdoctor.hooks.interfaces import Watched


@dataclass(frozen=True, slots=True)
class Write:
    """An op whose result lies in a tensor's memory.

    Attributes:
        site: Where it ran.
        norm: Norm of the result; None outside of an optimizer's phase.
        zeros: Share of its elements that are zero, likewise.
        in_place: The memory was the tensor's before; else the op has made it, or used it for something else.
    """

    site: Site
    norm: float | None
    zeros: float | None
    in_place: bool


def last_written(writes: Sequence[Write], step: int) -> Where | None:
    """Returns the address of the op whose result is there after a step, where it ran first; None where none did.

    Args:
        writes: Of one tensor, in the order of the ops.
        step: The step.
    """
    last = next((write.site for write in reversed(writes)), None)
    same = (write.site for write in writes if last and (write.site.op, write.site.line) == (last.op, last.line))
    return next((site.where(step, "none") for site in same), None)


class WritesProbe(TorchDispatchMode):
    """Notes the ops of a step that write some tensors.

    Args:
        named: Gives the tensors, by name; asked when the step is over, as a step may make them.

    Attributes:
        writes: By name, in the order of the ops.
        draws: An op of the optimizer's phase has drawn random numbers.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self.writes: Mapping[str, list[Write]] = {}
        self.draws = False
        self._named = named
        self._sites = Sites()
        self._by_memory: defaultdict[tuple[int, int], list[Write]] = defaultdict(list)

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Module hooks are in place inside."""
        with self._sites.attach(run):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:  # noqa: ARG002 - the seam's signature
        """The dispatch mode and the function mode are on."""
        self._sites.clear()
        self._by_memory.clear()
        self.draws = False
        with self, self._sites.functions.watching():
            yield

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Whose memory it was."""
        self.writes = {name: self._by_memory.get(_memory(tensor), []) for name, tensor in self._named()}
        self._by_memory.clear()
        self._sites.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if takes_apart(types, (args, kwargs)):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            kernel = kernel_name(func)
            site = self._sites.of(kernel)
            nested = any(tensor.is_nested for tensor in tensors_in([*args, *kwargs.values()]))
            if nested or kernel in UNINITIALISED:
                return func(*args, **kwargs)
            calls = split_calls(func, args, kwargs, kernel in OVERWRITES)
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
