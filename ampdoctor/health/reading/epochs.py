"""Steps that are counted anew in each epoch, as steps of the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Epochs:
    """Counts on where the number of a step falls back because another epoch begins.

    A number that falls back in the same epoch, or in an earlier one, is a restart, and falls back here too. Where the
    epoch is not known, one that has come to its end is over.
    """

    _epoch: float | None = None
    _offset: int = 0
    _offsets: dict[float, int] = field(default_factory=dict)
    _last: int = -1
    _gap: int = 1
    _of: int | None = None

    def step(self, epoch: float | None, step: int, of: int | None = None) -> int:
        """Returns the step of the run.

        Args:
            epoch: The epoch, where it is known.
            step: The number of the step, as it is logged.
            of: How many steps an epoch has, where it is known.
        """
        if epoch is not None and self._epoch is not None and epoch != self._epoch:
            if epoch < self._epoch:
                self._offset = self._offsets.get(epoch, 0)
            elif step <= self._last:
                whole = of if of is not None and of >= self._last else self._last + self._gap - step
                self._offset += max(whole, self._last + 1 - step)
        elif epoch is None and of is not None and of == self._of and step <= self._last > of - self._gap:
            self._offset += max(of, self._last + 1 - step)
        elif step > self._last >= 0:
            self._gap = step - self._last
        if epoch is not None:
            self._epoch = epoch
            self._offsets[epoch] = self._offset
        self._last, self._of = step, of
        return self._offset + step
