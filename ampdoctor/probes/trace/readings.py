"""What the step's own Python code learned of non-finite values: as a number, or by comparing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ampdoctor.probes.trace.taint import NONE, Births

if TYPE_CHECKING:
    from ampdoctor.probes.ops.arguments import Ran
    from ampdoctor.probes.ops.sites import Site


class Readings:
    """The births behind the non-finite values that were read last.

    A loop that guards itself asks before it raises: `loss.item()`, `torch.isfinite(loss)`, `gradient.isnan().any()`.
    Each is an op with a non-finite input whose result cannot be one: a Python number, a tensor of booleans.

    Attributes:
        number: Of what became a Python number last.
        asked: Of what became a number, was compared, or was refused by an op last.
    """

    def __init__(self) -> None:
        self.number: Births = NONE
        self.asked: Births = NONE

    def note(self, ran: Ran, births: Callable[[Sequence[torch.Tensor], Site], Births]) -> None:
        """An op ran.

        Args:
            ran: The op.
            births: Gives the births of non-finite inputs at a site.
        """
        if not ran.bad:
            return
        if ran.kernel == "_local_scalar_dense":
            self.number = self.asked = births(ran.bad, ran.site)
        elif not ran.results:
            self.asked = births(ran.bad, ran.site)

    def refused(
        self, bad: Sequence[torch.Tensor], site: Site, births: Callable[[Sequence[torch.Tensor], Site], Births]
    ) -> None:
        """An op raised.

        Args:
            bad: Its non-finite inputs.
            site: Where it ran.
            births: As in `note`.
        """
        if bad:
            self.asked = births(bad, site)
