"""Turns the readings of a loop's steps into lines of the run's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampdoctor.evidence.log_records import DetailLine, StepLine, TensorDetail
from ampdoctor.live.data_stats import DataStats, TakenIn
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.live.loop_watch import UpdateAttempt
from ampdoctor.live.numbers.readings import DetailReading, StepReading

_MOST = 64
"""Steps of all optimizers that may wait for numbers; numbers of older ones will not come."""
_ROOT = "(root)"
"""Shown for the model itself, whose module name is "", as in the reports' tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The data of a step that the host has at once."""

    accepted: int
    micro_steps: int
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    seconds: float | None
    taken_in: TakenIn


class StepLines:
    """Writes a line for each step, and one for the tensors of some steps; readings may arrive some steps late."""

    def __init__(self, log: RunLog, intake: DataStats) -> None:
        self._log = log
        self._intake = intake
        self._optimizers: dict[str, int] = {}
        self._groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._steps: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self._facts: dict[tuple[str, int], _Facts] = {}
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
        self._facts[attempt.name, attempt.step] = _Facts(
            accepted=self._accepted.get(attempt.name, 0),
            micro_steps=attempt.micro_steps,
            learning_rates=_of_groups(groups, "lr"),
            weight_decays=_of_groups(groups, "weight_decay"),
            seconds=attempt.seconds,
            taken_in=self._intake.stepping(attempt.name, attempt.optimizer),
        )
        for waiting in (self._facts, self._uncertain):
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
        facts = self._facts.pop((reading.optimizer, reading.step), None)
        taken_in = None if facts is None else facts.taken_in
        self._log.write(
            StepLine(
                step=reading.step,
                accepted=None if facts is None else facts.accepted,
                micro_steps=reading.micro_steps if facts is None else facts.micro_steps,
                optimizer=self._optimizers.get(reading.optimizer, 0),
                loss=reading.loss,
                gradient_norm=reading.gradient_norm,
                norm_local=reading.norm_local,
                norm_clipped=reading.norm_clipped,
                max_norm=reading.max_norm,
                loss_scale=reading.loss_scale,
                skipped=reading.skipped,
                growth_tracker=reading.growth_tracker,
                learning_rates=() if facts is None else facts.learning_rates,
                weight_decays=() if facts is None else facts.weight_decays,
                seconds=None if facts is None else facts.seconds,
                data_seconds=None if taken_in is None else taken_in.data_seconds,
                memory_bytes=None if taken_in is None else taken_in.memory.most_bytes,
                memory_retries=None if taken_in is None else taken_in.memory.retries,
                samples=None if taken_in is None else taken_in.counted.samples,
                tokens=None if taken_in is None else taken_in.counted.tokens,
                batch_elements=reading.batch.elements,
                batch_rms=reading.batch.rms,
                batch_zero_share=reading.batch.zero_share,
                batch_fingerprint=reading.batch.fingerprint,
            )
        )

    def detail(self, make: Callable[[], DetailReading]) -> None:
        """Hands over the tensors' numbers of a step; the log's own thread counts them."""
        self._log.defer(lambda: self._detail(make()))

    def _detail(self, reading: DetailReading) -> DetailLine:
        tensors = tuple(
            TensorDetail(
                tensor=self._log.index_of(one.name or _ROOT),
                role=one.role,
                part=one.part,
                call=one.call,
                format=one.format,
                elements=one.elements,
                sampled=one.sampled,
                norm=one.norm,
                amax=one.amax,
                nonfinite=one.nonfinite,
                scale=one.scale,
                zero_share=one.zero_share,
                flushed_share=one.flushed_share,
                headroom_binades=one.headroom_binades,
                update_ratio=one.update_ratio,
                unmoved_share=one.unmoved_share,
                histogram=None if one.role == "activation" else one.histogram.to_dict(),  # they are many
            )
            for one in reading.tensors
        )
        return DetailLine(
            step=reading.step,
            reason=reading.reason,
            optimizer=self._optimizers.get(reading.optimizer, 0),
            loss_scale=reading.loss_scale,
            tensors=tensors,
        )


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
    return tuple(float(value) for group in groups if isinstance(value := group.get(key), int | float))
