"""Turns the readings of a loop's steps into lines of the run's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ampdoctor.evidence.log_records import StepLine
from ampdoctor.live.data_stats import DataStats
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.live.loop_watch import UpdateAttempt
from ampdoctor.live.numbers.readings import StepReading
from ampdoctor.live.numbers.step_numbers import MakeDetail

_AS_READ = (
    *("step", "loss", "gradient_norm", "norm_local", "norm_clipped", "max_norm", "loss_scale", "skipped"),
    *("growth_tracker", "micro_steps"),
)
"""Fields that a `StepReading` and a `StepLine` share."""
_MOST = 64
"""Steps of all optimizers that may wait for numbers; numbers of older ones will not come."""
_ROOT = "(root)"
"""Shown for the model itself, whose module name is "", as in the reports' tables."""


class StepLines:
    """Writes a line for each step, and one for the tensors of some steps; readings may arrive some steps late."""

    def __init__(self, log: RunLog, intake: DataStats) -> None:
        self._log = log
        self._intake = intake
        self._optimizers: dict[str, int] = {}
        self._groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._steps: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self._waiting: dict[tuple[str, int], dict[str, Any]] = {}  # the fields of their lines, without the numbers
        self._uncertain: dict[tuple[str, int], None] = {}
        self._scaled = False  # the settings of a scaler are in the log
        self.attempted = self.taken = 0  # steps of all optimizers; `taken` without the skipped ones

    @property
    def turn(self) -> int:
        """The step that is about to begin: the number of steps of the optimizer with the fewest."""
        return min(self._steps.values(), default=0)

    def begins(self, attempt: UpdateAttempt, named: Sequence[Sequence[tuple[str, object]]]) -> None:
        """Called before an optimizer steps, or its scaler skips; `named` are the names and parameters of each group."""
        if len(self._groups.get(attempt.name, ())) != len(named):
            self._optimizers.setdefault(attempt.name, len(self._optimizers))
            self._groups[attempt.name] = tuple(tuple(self._log.index_of(name) for name, _ in group) for group in named)
            self._log.head(optimizers=tuple(self._optimizers), groups=tuple(map(self._groups.get, self._optimizers)))
        if not self._scaled and (settings := _settings_of(attempt.scaler)) is not None:
            self._scaled = True
            self._log.head(scaler=settings)
        groups = attempt.optimizer.param_groups
        self._waiting[attempt.name, attempt.step] = {
            "accepted": self._accepted.get(attempt.name, 0),
            "micro_steps": attempt.micro_steps,
            "learning_rates": _of_groups(groups, "lr"),
            "weight_decays": _of_groups(groups, "weight_decay"),
            "seconds": attempt.seconds,
            **self._intake.stepping(attempt.name, attempt.optimizer),
        }
        for waiting in (self._waiting, self._uncertain):
            while len(waiting) > _MOST:
                del waiting[next(iter(waiting))]

    def ended(self, attempt: UpdateAttempt, *, skipped: bool | None) -> None:
        """Called after the step; where only a device knows whether it was skipped, it counts as taken for now."""
        self.attempted += 1
        self._steps[attempt.name] = attempt.step + 1
        self._count(attempt.name, int(not skipped))
        if skipped is None:
            self._uncertain[attempt.name, attempt.step] = None

    def _count(self, optimizer: str, taken: int) -> None:
        self.taken += taken
        self._accepted[optimizer] = self._accepted.get(optimizer, 0) + taken

    def step(self, reading: StepReading) -> None:
        """Writes the line of a step whose numbers have arrived."""
        if (reading.optimizer, reading.step) in self._uncertain:
            del self._uncertain[reading.optimizer, reading.step]
            self._count(reading.optimizer, -int(bool(reading.skipped)))
        known = {name: getattr(reading, name) for name in _AS_READ}
        known |= {f"batch_{field.name}": getattr(reading.batch, field.name) for field in fields(reading.batch)}
        known |= self._waiting.pop((reading.optimizer, reading.step), {})
        self._log.write(StepLine(optimizer=self._optimizers.get(reading.optimizer, 0), **known))

    def detail(self, make: MakeDetail) -> None:
        """Hands over the tensors' numbers of a step; the log's own thread counts them."""
        self._log.write(lambda: make(self._optimizers, lambda name: self._log.index_of(name or _ROOT)))


def _settings_of(scaler: Any) -> dict[str, float] | None:
    """Returns what `state_dict()` contains for a scaler like torch's, from host values only: no device is read."""
    try:
        return {
            "scale": float(scaler._init_scale),  # noqa: SLF001 - loading a state sets it, too
            "growth_factor": float(scaler.get_growth_factor()),
            "backoff_factor": float(scaler.get_backoff_factor()),
            "growth_interval": int(scaler.get_growth_interval()),
        }
    except (AttributeError, TypeError, ValueError):  # no scaler, or another kind
        return None


def _of_groups(groups: Sequence[Mapping[str, Any]], key: str) -> tuple[float, ...]:
    """Returns a setting of each parameter group where it is a number; a tensor on a device is not read."""
    return tuple([float(value) for group in groups if isinstance(value := group.get(key), int | float)])
