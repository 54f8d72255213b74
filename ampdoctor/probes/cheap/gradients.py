"""Gradients as the optimizer gets them: after unscaling and clipping, before the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ampdoctor.loop.watched import Watched

Gradients = Mapping[str, torch.Tensor]


class GradientProbe:
    """Copies the gradients of one step.

    Attributes:
        gradients: By parameter name, float32 (or float64), dense; of the step that was finished last.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """A hook before each optimizer's step."""
        self._run = run
        self._names = run.parameter_names()
        with ExitStack() as stack:
            for optimizer in run.optimizers.values():
                stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            yield

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the seam's signature
        """Forget the last step."""
        self.gradients = {}
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Without an optimizer the gradients lie where the backward left them."""
        if not self._run.optimizers:
            scale = self._run.events.scale()  # nobody has unscaled them
            self._copy(self._run.model.parameters(), None if scale is None else torch.tensor(scale))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # a fused optimizer is handed scaled gradients, and the scale to divide them by
        self._copy(
            (p for group in optimizer.param_groups for p in group["params"]), getattr(optimizer, "grad_scale", None)
        )

    def _copy(self, parameters: Any, scale: torch.Tensor | None = None) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                grad = parameter.grad.detach()
                grad = grad.to_dense() if grad.layout is not torch.strided else grad
                wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
                self.gradients[self._names[id(parameter)]] = wide if scale is None else wide / scale.to(wide.device)


def relative_error(got: Gradients, reference: Gradients) -> float:
    """Relative L2 error of all gradients together; inf where one is not finite. A missing gradient counts as zero.

    Args:
        got: By name.
        reference: By name, in fp32 from the same state.
    """
    error = norm = 0.0
    for name, expected in reference.items():
        size = float(expected.double().square().sum())
        norm += size
        actual = got.get(name)
        error += size if actual is None else float((actual.double() - expected.double()).square().sum())
    if norm == 0.0:
        return 0.0 if error == 0.0 else math.inf
    ratio = math.sqrt(error / norm)
    return ratio if math.isfinite(ratio) else math.inf
