"""Where a gradient that is zero throughout became so: the op of the backward that made nothing of something."""

from __future__ import annotations

import torch

from ampdoctor.evidence.of_runs.trace import Died
from ampdoctor.probes.ops.arguments import Ran
from ampdoctor.probes.ops.sites import Site
from ampdoctor.probes.trace.taint import ByMemory, storage_key


class Dead:
    """Follows zeros through the memory of a backward, from the op that makes them to the parameters that get them."""

    def __init__(self) -> None:
        self._by: ByMemory[int] = ByMemory()
        self._sites: list[tuple[int, Site]] = []
        self._parameters: dict[str, int] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._by.clear()
        self._sites.clear()
        self._parameters.clear()

    def note(self, ran: Ran, order: int) -> None:
        """An op of the backward ran.

        Args:
            ran: The op.
            order: Its position among the ops of the step.
        """
        inherited = next((i for t in ran.call.reads if (i := self._by.get(storage_key(t))) is not None), None)
        for result in ran.results:
            key = storage_key(result)
            if not result.numel() or bool(torch.count_nonzero(result)):
                self._by.pop(key, None)
            elif inherited is not None:
                self._by[key] = inherited
            elif any(bool(torch.count_nonzero(t)) for t in ran.call.before):
                self._by[key] = len(self._sites)
                self._sites.append((order, ran.site))

    def reaches(self, name: str, gradient: torch.Tensor) -> None:
        """A parameter has got its gradient."""
        index = self._by.get(storage_key(gradient))
        if index is not None and not bool(torch.count_nonzero(gradient)):
            self._parameters[name] = index
        else:
            self._parameters.pop(name, None)

    def died(self, step: int) -> tuple[Died, ...]:
        """Returns the parameters that got zeros, with the op that made them, in the order in which they got them."""
        sites = ((name, *self._sites[index]) for name, index in self._parameters.items())
        return tuple(Died(parameter=name, order=order, where=site.where(step, "none")) for name, order, site in sites)
