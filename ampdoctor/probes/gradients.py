"""Gradients as the optimizer gets them: after unscaling and clipping, before the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.hooks.torch_internals import in_backward
from ampdoctor.numerics.tensors import Distance, together
from ampdoctor.probes.modules import is_watched, tensors_in
from ampdoctor.probes.ops import OpProbe, Probe, Site

Gradients = Mapping[str, torch.Tensor]


class _Received(Probe):
    """Base of probes that get each gradient of an optimizer, dense, with the scale to divide it by."""

    def _takes(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Take a gradient; `scale` is what it still has to be divided by."""
        raise NotImplementedError

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        self._run = run
        self._names = run.parameter_names()
        with ExitStack() as stack:
            for optimizer in run.optimizers.values():
                stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            yield

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Without an optimizer, read the gradients that the backward left."""
        if not self._run.optimizers:
            scale = self._run.events.scale()  # they are still scaled
            divisor = None if scale is None else torch.tensor(scale, dtype=torch.float32)  # as GradScaler keeps it
            self._copy(self._run.model.parameters(), divisor)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # a fused optimizer gets scaled gradients, and the scale to divide them by
        self._copy(parameters_of(optimizer), getattr(optimizer, "grad_scale", None))

    def _copy(self, parameters: Any, scale: torch.Tensor | None = None) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                grad = parameter.grad.detach()
                grad = grad.to_dense() if grad.layout is not torch.strided else grad
                self._takes(self._name_of(parameter), grad, scale)

    def _name_of(self, parameter: torch.Tensor) -> str:
        """Look the name up again if needed: a step may add parameters (`add_param_group`)."""
        if id(parameter) not in self._names:
            self._names = self._run.parameter_names()
        return self._names[id(parameter)]


class GradientProbe(_Received):
    """Copies the gradients of the step that was finished last; if it makes several updates, those of the last one."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}  # dense float32 (or float64), by parameter name
        self.times = Counter[str]()  # how often an optimizer got each of them

    def _takes(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None) -> None:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        self.gradients[name] = wide if scale is None else wide / scale.to(wide.device)
        self.times[name] += 1

    def begin(self) -> None:
        self.gradients, self.times = {}, Counter()


class DistanceProbe(_Received):
    """Compares the gradients of one step with those of an fp32 reference, tensor by tensor, without copies.

    Each reference gradient is released once it was compared. `times` says how often an optimizer got a gradient in
    fp32, if more than once: the last update is compared. `distances` is complete once the step is finished.
    """

    def __init__(self, reference: Gradients, times: Mapping[str, int] = MappingProxyType({})) -> None:
        self._reference = dict(reference)
        self.distances = {name: Distance() for name in reference}
        self._ahead = Counter({name: count - 1 for name, count in times.items()})

    def _takes(self, name: str, gradient: torch.Tensor, scale: torch.Tensor | None) -> None:
        if self._ahead[name] > 0:
            self._ahead[name] -= 1
            return
        expected = self._reference.pop(name, None)
        if expected is not None:
            self.distances[name].add(gradient if scale is None else gradient / scale.to(gradient.device), expected)

    def finish(self, step: int, loss: Any) -> None:
        """Count gradients that the step does not have as zero."""
        super().finish(step, loss)
        while self._reference:
            name, expected = self._reference.popitem()
            self.distances[name].add(None, expected)

    @property
    def distance(self) -> Distance:
        return together(self.distances.values())


def distances(got: Gradients, reference: Gradients) -> dict[str, Distance]:
    """How far each gradient is from the fp32 reference; a missing gradient counts as zero."""
    found = {name: Distance() for name in reference}
    for name, expected in reference.items():
        found[name].add(got.get(name), expected)
    return found


def relative_error(got: Gradients, reference: Gradients) -> float:
    """Relative L2 error of all gradients together; inf where one is not finite. A missing gradient counts as zero."""
    return together(distances(got, reference).values()).relative


class LastBitsProbe(OpProbe):
    """Moves each fp32 result that depends on a weight by its last bit, up or down: rounding, drawn anew."""

    def begin(self) -> None:
        self._drawn = torch.Generator().manual_seed(0)

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - the seam's signature
        result = func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable or any(one.alias_info is not None for one in schema.returns):
            return result  # a view, or values that were moved when they were made
        if not in_backward() and not any(tensor.requires_grad for tensor in tensors_in([*args, *kwargs.values()])):
            return result  # data, and numbers that the loop's code counts with
        return tree_map_only(torch.Tensor, self._moved, result)

    def _moved(self, result: torch.Tensor) -> torch.Tensor:
        if result.dtype is not torch.float32 or not is_watched(result) or result.layout is not torch.strided:
            return result
        signs = torch.randint(0, 2, result.shape, generator=self._drawn).mul_(2).sub_(1)
        return result * (1 + torch.finfo(torch.float32).eps * signs.to(result))
