"""The trace of a loop that is somebody else's: its models are met when they are called, its steps end when they end.

A replay knows its parts before its first step and may run the step again. A loop that runs only once, as in a user's
test, is traced from its first op on, and what it turns out to be made of is learned on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.evidence.of_runs.trace import Origin, Trace
from ampdoctor.hooks.nested import iter_tensors
from ampdoctor.hooks.torch_internals import outside_transforms, under_fake_tensors, unseen, unwrapped
from ampdoctor.probes.cheap.nonfinite import holds_nan, is_mask, state_tensors
from ampdoctor.probes.ops.exact import dense, is_nonfinite
from ampdoctor.probes.ops.modules import CalledModules
from ampdoctor.probes.trace.op_trace import OpTraceProbe
from ampdoctor.probes.trace.taint import Births, storage_key

if TYPE_CHECKING:
    from torch import nn

    from ampdoctor.hooks.interfaces import Watched
    from ampdoctor.probes.ops.sites import Site

_WRITE_LISTS = frozenset(name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))
"""Ops that write into each tensor of a list: under a mode torch forgets to count that as a change of them."""
_UNCOMPUTED: set[Origin] = {"constant", "data"}
"""Origins of what no op computed."""


class LiveTrace(OpTraceProbe):
    """Traces ops from `watching` on, until that context ends or `idle` is set.

    Args:
        name_of: As in `CalledModules`.

    Attributes:
        idle: Nothing is looked at any more; the hooks stay until `watching` ends.
    """

    def __init__(self, name_of: Callable[[nn.Module, Any, bool], str | None]) -> None:
        super().__init__()
        self._sites.modules = CalledModules(name_of)
        self.idle = False
        self._unexplained: set[int] = set()

    @contextmanager
    def watching(self, run: Watched) -> Iterator[None]:
        """The modes and the module hooks are in place, with the first step begun."""
        self._run = run
        with self._sites.attach(run), self.during(0):
            yield

    def met(self, tensors: Iterable[torch.Tensor]) -> None:
        """The run has more parts than before.

        Args:
            tensors: The state of the new parts. What was met earlier in this step may be non-finite since, which is
                the step's own doing.
        """
        with unseen():
            before, unread, known = self._before, self._unread, self._belongings
            self._sites.take_names()
            self._take_stock()
            self._belongings.follow(known)
            new = {id(t) for t in tensors if not known.knows(t)}
            self._before = before | self._before & new
            self._unread = unread | self._unread & new
            for tensor in self._belongings.nonfinite:
                if id(tensor) in new and self._origins(tensor) <= _UNCOMPUTED:
                    self._disown(tensor)

    def given(self, batch: Any) -> None:
        """A model is called with what it did not make: a NaN in it is the data's, whatever op put it there.

        So is an infinity that no op computed, but for a mask's.
        """
        with unseen():
            for path, tensor in iter_tensors(batch):
                if tensor.grad_fn is not None or self._belongings.owns(tensor) or not is_nonfinite(tensor):
                    continue
                if holds_nan(tensor) or (_is_data(tensor) and self._origins(tensor) <= _UNCOMPUTED):
                    self._disown(tensor)
                    self._belongings.bring(tensor, path)

    def next_step(self, step: int) -> None:
        """A step is over, and another one begins."""
        with unseen():
            self._sites.next_step()
            self._begin(step)

    def harm(self, sink: str, tensor: torch.Tensor) -> bool:
        """Note a harmed value under the name of its sink; False where it is finite."""
        if under_fake_tensors():
            return False
        with unseen():
            bad = is_nonfinite(tensor)
            if bad:
                self._harm(sink, tensor)
        return bad

    def behind(self, sink: str, tensors: Iterable[torch.Tensor]) -> tuple[Trace, Births] | None:
        """What was seen of the step, with these as all that is harmed, though none of them counts as harmed yet.

        Args:
            sink: What they are.
            tensors: As they are, or as a function transform wraps them.

        Returns:
            The trace, and the numbers of what they descend from; None where they are finite.
        """
        kept, self._harms = self._harms, {}
        try:
            with outside_transforms():
                bad = [self.harm(sink, unwrapped(tensor)) for tensor in tensors]
            return (self.gathered(), self._harms[sink]) if any(bad) else None
        finally:
            self._harms = kept

    @property
    def asked(self) -> Births:
        """The numbers of what the loop's code has looked at last."""
        return self._readings.asked

    def harm_state(self) -> bool:
        """Note parameters, buffers and optimizer state that are non-finite and were not so before; False for none."""
        if under_fake_tensors():
            return False
        with unseen():
            buffers = (t for kind, _, t in state_tensors(self._run) if kind == "buffer" and is_nonfinite(t))
            # a model may make its mask when it is first called
            self._before |= {id(t) for t in buffers if is_mask(t) and self._origins(t) <= {"constant"}}
            return self._harm_state()

    def harm_by_raising(self) -> None:
        """Note what the user's code had looked at when it raised."""
        self._harm_by_raising()

    def gathered(self) -> Trace:
        """What was seen of the step so far; what was written past the dispatcher has no birth."""
        trace, unexplained = self._gathered(), self._unexplained
        seen = tuple(birth for index, birth in enumerate(trace.births) if index not in unexplained)
        lost = tuple(sink for sink, origins in self._harms.items() if origins <= unexplained and sink != "raised")
        return replace(trace, births=seen, unattributed=lost)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.idle or under_fake_tensors():
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        if func.namespace == "aten" and func.overloadpacket.__name__ in _WRITE_LISTS:
            for tensor in args[0]:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        return result

    def _brought(self, tensor: torch.Tensor, site: Site) -> Births:
        """What is non-finite, was made by no op here and belongs to nothing came with the data."""
        written = self._belongings.came_finite(tensor)
        unowned = not written and not self._belongings.owns(tensor)
        if unowned and site.phase in ("forward", "loss") and _is_data(tensor):
            self._belongings.bring(tensor, "")
        births = super()._brought(tensor, site)
        if written:
            self._unexplained |= births
        return births

    def _meant(self, births: Births) -> bool:
        """No infinity is meant that was written past the dispatcher."""
        return not births & self._unexplained and super()._meant(births)

    def _begin(self, step: int) -> None:
        self._unexplained = set()
        super()._begin(step)

    def _take_stock(self) -> None:
        """As in a replay; but a moment that is infinite already is sick as soon as a step reads it."""
        super()._take_stock()
        self._before -= {id(t) for kind, _, t in state_tensors(self._run) if kind == "optimizer_state"}

    def _disown(self, tensor: torch.Tensor) -> None:
        """What put the non-finite values there is no culprit: they came with the run."""
        self._taint.forget(tensor)
        self._given.pop(storage_key(tensor), None)

    def _origins(self, tensor: torch.Tensor) -> set[Origin]:
        """How what is non-finite in it came into this step; nothing where it has not been looked at."""
        return {self._births[index].origin for index in self._taint.births(tensor)}


def _is_data(tensor: torch.Tensor) -> bool:
    """Non-finite values of it are no mask's (0 and -inf), and no single number that the code writes."""
    if not tensor.dim():
        return False
    values = dense(tensor)
    return not is_mask(values) or bool((values[torch.isfinite(values)] != 0).any())
