"""`torch.autograd.set_detect_anomaly(True)` around the step.

Read as an answer: the step in which it raises "Function 'XBackward0' returned nan values"; the op is X. Its traceback
shows the forward line and not the module; it counts as naming the very module call that made the failing node, as a
reader with a debugger would find it.
"""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.peers.answer import Answer, Case
from benchmarks.peers.module_stack import ModuleStack

_RAISED = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan values")


def detect_anomaly(case: Case) -> Answer | None:
    """Train under anomaly mode."""
    loop = case.loop()
    modules, started = ModuleStack(), _Started()
    with modules.attached(loop.model), warnings.catch_warnings(action="ignore"):
        for step, batch in loop.batches():
            modules.clear()
            try:
                with torch.autograd.set_detect_anomaly(True), started.noted():
                    loop.step(batch)
            except RuntimeError as error:
                found = _RAISED.search(str(error))
                if found is None:
                    raise
                return Answer(
                    step=step, module=modules.of_node(started.sequence), op=found[1], said=str(error).splitlines()[0]
                )
    return None


class _Started:
    """The sequence number of the autograd node that started last: the failing one, when a backward raises."""

    def __init__(self) -> None:
        self.sequence = -1

    def noted(self) -> Any:
        backward = torch.Tensor.backward

        def noting(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            for node in _graph(loss.grad_fn):
                node.register_prehook(partial(self._note, node._sequence_nr()))  # noqa: SLF001
            backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]

        return mock.patch.object(torch.Tensor, "backward", noting)

    def _note(self, number: int, _gradients: object) -> None:
        self.sequence = number


def _graph(root: Any) -> list[Any]:
    """Return all nodes that lead to the root."""
    seen, waiting = {root: None}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen[node] = None
                waiting.append(node)
    return list(seen)
