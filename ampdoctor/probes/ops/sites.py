"""Where an op runs: module, phase and line; in a backward those of the forward op whose derivative it is."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ampdoctor.evidence.where import NonFinite, Phase, Where
from ampdoctor.hooks.torch_internals import (
    Backward,
    current_node,
    in_backward,
    seen_backwards,
    sequence_number,
    sequence_of,
)
from ampdoctor.probes.ops.modules import ModuleStack
from ampdoctor.probes.ops.naming import function_name, user_level
from ampdoctor.probes.ops.source import applied_line, as_source, hook_line, user_line

if TYPE_CHECKING:
    from ampdoctor.hooks.interfaces import Watched

Line = tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Site:
    """The address of an op, before it is worth a `Where`.

    Attributes:
        phase: Part of the step.
        module: Running module, "" outside.
        call: Which call of it.
        op: User-level name without namespace.
        line: The user's line.
        forward_line: In a backward, the line of the forward op.
        micro_batch: Index in the accumulated step.
        recompute: Ran again by activation checkpointing.
        sequence: Autograd's number of the forward op; None where autograd does not record it.
        after_backward: The user's own code after the backward, outside every optimizer.
        applied: For the first op inside a custom autograd function's forward, the line that called the function: the
            function's own node has this op's number.
    """

    phase: Phase
    module: str
    call: int
    op: str
    line: Line
    forward_line: Line = None
    micro_batch: int = 0
    recompute: bool = False
    sequence: int | None = None
    applied: Line = None
    after_backward: bool = False

    def where(self, step: int, nonfinite: NonFinite, tensor: str | None = None) -> Where:
        """The site as evidence."""
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
    """The torch functions that are running, innermost last: the names that users know ops by.

    Inside a function of `torch.nn.functional` that is written in Python the mode is off (entering it again would call
    the same function for ever), so for one that is no aten op ("normalize") the kernel's own name has to do.
    """

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
        """The mode is on, also inside a backward: a checkpointed forward that runs again there has names too."""

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
    """Answers "where are we?" for each op of a step."""

    def __init__(self) -> None:
        self.modules = ModuleStack()
        self.functions = FunctionNames()
        self._by_sequence: dict[int, Site] = {}
        self._order: list[int] = []
        self._after_backward = False
        self._micro_batch = 0
        self._since = 0

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Module hooks are in place inside."""
        self._run = run
        self.take_names()
        with self.modules.attach(run):
            yield

    def take_names(self) -> None:
        """The parameters have the names that the run gives them by now."""
        self._names = self._run.parameter_names()

    def next_step(self) -> None:
        """A new step of a loop begins in which a graph may outlive its step: the ops of the last step stay known."""
        since, self._since = self._since, len(self._order)
        for sequence in self._order[:since]:
            del self._by_sequence[sequence]
        del self._order[:since]
        self._since -= since
        self._begin()

    def clear(self) -> None:
        """A new step begins."""
        self._by_sequence.clear()
        self._order.clear()
        self._since = 0
        self._begin()

    def _begin(self) -> None:
        self.modules.clear()
        self.functions.running.clear()
        self._after_backward = False
        self._micro_batch = 0

    def of(self, kernel: str) -> Site:
        """The site of the op that is being dispatched; remembers a forward op under its autograd sequence number."""
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
            # what autograd records leads to a loss, also after an inner backward (a gradient penalty)
            self._after_backward = self._after_backward and site.sequence is None
            return replace(site, phase="optimizer", after_backward=True) if self._after_backward else site
        self._after_backward = self._after_backward and backward
        name, call = running
        site = Site("forward", name, call, self._op(kernel), user_line(), None, self._run.micro_batch, backward)
        return self._remember(site)

    def _op(self, kernel: str) -> str:
        running = self.functions.running
        name = running[-1] if running else user_level(kernel)
        # a cast is an op of its own, whether autocast slips it into another op or the user calls it half() or to()
        return kernel if kernel == "_to_copy" else name.removeprefix("_foreach_")

    def _outside(self, kernel: str, phase: Phase) -> Site:
        return Site(phase, "", 0, self._op(kernel), user_line(), None, self._run.micro_batch)

    def _remember(self, site: Site) -> Site:
        sequence = sequence_number()
        # only an op that autograd records moves the counter on
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
            # nodes that an op makes beside its own (views, in-place rebasing) belong to the op before them
            place = bisect.bisect_right(self._order, sequence)
            site = self._by_sequence[self._order[place - 1]] if place else None
        return site
