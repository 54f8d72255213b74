"""What most people do first: look at the loss and at every gradient after the step.

Read as an answer: that something is non-finite, in which step. It names no module, no op and no cause.
"""

from __future__ import annotations

import torch

from benchmarks.peers.answer import Answer, Case


def loss_and_gradients(case: Case) -> Answer | None:
    """Ask `isfinite` of the loss and of every gradient, once a step."""
    loop = case.loop()
    for step, batch in loop.batches():
        loss = loop.step(batch)
        if not loss.isfinite().all():
            return Answer(step=step, said=f"the loss is {loss.item()}")
        for name, parameter in loop.model.named_parameters():
            if parameter.grad is not None and not _finite(parameter.grad):
                return Answer(step=step, said=f"the gradient of {name} is not finite")
    return None


def _finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
