"""fp32 master weights for a half model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.precision.casting import moments
from ampdoctor.precision.nested import REDUCED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer


class MasterWeights:
    """The fp32 copies that optimizers step in place of half parameters.

    A gradient that a half parameter receives is at once added, in fp32, to its master's, and taken from the
    parameter: unscaling, clipping and `zero_grad` then act on what the optimizer holds. After each step of an optimizer
    its half parameters are overwritten with the rounded masters.

    Attributes:
        pairs: (half parameter, master), in the order of the optimizers' groups; a shared parameter once.
    """

    __slots__ = ("_handles", "_of", "_optimizers", "pairs")

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self.pairs: list[tuple[nn.Parameter, Tensor]] = []
        self._of: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._master(parameter) for parameter in group["params"]]
            for parameter, master in self.pairs:
                if parameter in optimizer.state:
                    optimizer.state[master] = _state_in(optimizer.state.pop(parameter), torch.float32)
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.publish()))

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype not in REDUCED:
            return parameter
        if id(parameter) not in self._of:
            master = parameter.detach().float().requires_grad_(parameter.requires_grad)
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
            self._of[id(parameter)] = master
            self.pairs.append((parameter, master))
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(_collect(master))
                self._handles.append(handle)
        return self._of[id(parameter)]

    def of(self, parameter: Tensor) -> Tensor:
        """What the optimizers step for a parameter: its master, or the parameter itself where it has none."""
        return self._of.get(id(parameter), parameter)

    def publish(self) -> None:
        """Overwrite the half parameters with the rounded masters."""
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)

    def reload(self) -> None:
        """Overwrite the masters with the half parameters, after someone has put a state into the model."""
        with torch.no_grad():
            for parameter, master in self.pairs:
                master.copy_(parameter)

    def remove(self) -> None:
        """Give the optimizers their half parameters back, with gradients and state in the parameters' dtype."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        back = {id(master): parameter for parameter, master in self.pairs}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [back.get(id(parameter), parameter) for parameter in group["params"]]
            for parameter, master in self.pairs:
                if master in optimizer.state:
                    optimizer.state[parameter] = _state_in(optimizer.state.pop(master), parameter.dtype)
        for parameter, master in self.pairs:
            if master.grad is not None:
                parameter.grad = master.grad.to(parameter.dtype)


def _collect(master: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        wide = gradient.float()
        master.grad = wide if master.grad is None else master.grad + wide
        parameter.grad = None

    return hook


def _state_in(state: Any, dtype: torch.dtype) -> Any:
    """A parameter's optimizer state with its moments in `dtype`; torch's step counter stays fp32."""
    return {**state, **{key: moment.to(dtype) for key, moment in moments(state).items()}}


@contextmanager
def master_weights(optimizers: Iterable[Optimizer]) -> Iterator[MasterWeights]:
    """Let optimizers step fp32 copies of half parameters; the half parameters follow.

    Args:
        optimizers: Their fp32 parameters are left as they are.

    Yields:
        The masters. Left, the optimizers hold the half parameters again.
    """
    masters = MasterWeights(optimizers)
    try:
        yield masters
    finally:
        masters.remove()
