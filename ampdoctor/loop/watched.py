"""What a trace needs to know of the run that it watches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ampdoctor.loop.backwards import Backwards


class Calls(Protocol):
    """Which part of a step is running."""

    @property
    def part(self) -> str | None:
        """Return "optimizer" in an optimizer's step, "scaler" in a scaler's method, else None."""
        ...

    def scale(self) -> float | None:
        """Return the run's loss scale now; None where no scaler is enabled."""
        ...

    @property
    def backwards(self) -> Backwards:
        """Tells the scale of the gradients that are on their way."""
        ...


class Watched(Protocol):
    """A run whose steps are traced.

    The protocol is here because a trace is the same for a replay (a `Session`), whose parts are known before its first
    step, and for somebody else's loop, whose parts are met one by one.
    """

    @property
    def model(self) -> nn.Module:
        """The model whose parameters, buffers and modules are the run's."""
        ...

    @property
    def module_names(self) -> Mapping[str, str]:
        """Maps names of `model.named_modules()` to the names to show."""
        ...

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name."""
        ...

    @property
    def events(self) -> Calls:
        """Tells which part of the step is running."""
        ...

    @property
    def micro_batch(self) -> int:
        """The micro-batch's index inside an accumulated step."""
        ...

    def beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the weights that the run's own code keeps beside the model: averages, teachers."""
        ...

    def parameter_names(self) -> dict[int, str]:
        """Names by `id(parameter)`; "NAME.group0.param0" for one that only the optimizer NAME holds."""
        ...

    def clean_name(self, name: str) -> str:
        """Return the name to show for a parameter's or a buffer's name."""
        ...

    def current_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (path, tensor) for the batches that the running step was given."""
        ...
