"""The steps of one optimizer over time: what a rule on steps sees."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ampdoctor.diagnosis.over_time.batch_courses import BatchCourses
from ampdoctor.diagnosis.over_time.beginning import Beginning
from ampdoctor.diagnosis.over_time.course import HOP, LEAST, LENGTH, Course, LongCourse
from ampdoctor.diagnosis.over_time.descent import MATTERS, Descent
from ampdoctor.diagnosis.over_time.ill_steps import IllSteps, proves_a_skip
from ampdoctor.diagnosis.over_time.scale_history import ScaleHistory
from ampdoctor.evidence.log_records import EndLine, StepLine

QUIET = 25
"""Accepted steps without a judgement after the batch or the learning rate has changed at once."""
_AT_ONCE = 1.5
"""Factor from one step to the next that no schedule makes that goes step by step."""
FAR = 6.0
"""Robust deviations from which a number has left what is usual: OLMo's and levanter's."""
_FAR_BEYOND = 10.0
"""Factor beyond every learning rate before from which a jump is no restart, whose losses come back by themselves."""
_LOOK_BACK = 32
"""Steps within which one departure is held to belong to another."""
EPISODE = 256
"""Steps without the same finding after which it is told again: what goes on is one alert."""
_SAID = {
    "schedule": "optimizer",
    "batch": "data",
    "forward": "forward",
    "loss": "data",
    "gradient": "gradient",
    "scale": "scale",
}
"""What is said to have moved first where this has departed; of several in one step, the first here."""


@dataclass(slots=True)
class Spike:
    """A loss that left what was usual.

    Attributes:
        step: At which.
        usual: The loss before it.
        limit: Loss above which it has not come back.
        above: Steps since then that were above the limit, of those since the last one below it.
        value: The loss at that step.
    """

    step: int
    usual: float
    limit: float
    value: float
    above: int = 0


_STRETCH = 200
"""Losses whose mean is held against the best one before."""
_GAIN = 1e-3
"""Share by which a mean must be below the best one to count as lower: the means of 200 noisy losses differ by as
much."""


@dataclass(slots=True)
class Plateau:
    """How long the loss has not fallen.

    Attributes:
        best: Lowest mean of `_STRETCH` losses.
        steps: Steps since then.
        norm_then: Mean gradient norm at that time.
        norm_now: Of the last stretch.
        told: Somebody has said so.
    """

    best: float = math.nan
    steps: int = 0
    norm_then: float = math.nan
    norm_now: float = math.nan
    told: bool = False
    _loss: float = 0.0
    _norm: float = 0.0
    _count: int = 0

    def add(self, loss: float, norm: float) -> None:
        """An accepted step more."""
        self._loss += loss
        self._norm += norm
        self._count += 1
        if self._count < _STRETCH:
            return
        loss, norm = self._loss / _STRETCH, self._norm / _STRETCH
        self._loss = self._norm = 0.0
        self._count = 0
        self.norm_now, self.steps = norm, self.steps + _STRETCH
        if not loss >= self.best - _GAIN * abs(self.best):
            self.best, self.steps, self.norm_then, self.told = loss, 0, norm, False


@dataclass(slots=True)
class Setting:
    """A setting of an optimizer's parameter groups.

    Attributes:
        now: Of each group.
        before: In the step before; empty where there were other groups.
        highest: The highest of each before this step.
    """

    now: tuple[float, ...] = ()
    before: tuple[float, ...] = ()
    highest: tuple[float, ...] = ()

    def hear(self, values: tuple[float, ...]) -> None:
        """A step more."""
        if values == self.now == self.before:
            return
        if len(values) != len(self.now):
            self.now, self.before, self.highest = values, (), values
            return
        if self.before != self.now:
            self.highest = tuple(map(max, self.highest, self.now))
        self.before, self.now = self.now, values

    def rises(self, factor: float) -> bool:
        """Whether that of a group is higher than in the step before by a factor, or was zero."""
        return self.now != self.before and any(
            now > factor * before for before, now in zip(self.before, self.now, strict=False)
        )

    def falls(self, factor: float) -> bool:
        """Whether that of a group is lower than in the step before by a factor, or was none and is below zero."""
        return self.now != self.before and any(
            now < before / factor for before, now in zip(self.before, self.now, strict=False)
        )


@dataclass(slots=True)
class StepMoment:
    """A step and what came before it: the evidence of rules on steps. It is changed by the next step.

    Attributes:
        line: The step.
        groups: Indices of the names of the parameters of each of the optimizer's groups, where they are known.
        alone: No other optimizer steps in this run: what two of them minimise, one wins and the other loses.
        accepted: Accepted steps heard before it.
        judged: Enough came before it, and nothing has changed at once of late.
        rising: The learning rate has risen over the last `LENGTH` steps, as in a warm-up.
        loss: Course of the loss, without this step's where it is out of the usual.
        norm: Course of the gradient norm before clipping.
        first_losses: What the loss was at first, and is now, this step's included.
        first_norms: Likewise the norm.
        seconds: Course of the time of a step.
        early_seconds: What a step usually took in the first whole window with batches of this size; inf before.
        memory: Course of the memory.
        batch: What the batches usually are.
        scale: The loss scale.
        loss_above: How far this step's loss is above the usual, in robust deviations.
        norm_above: Likewise its gradient norm.
        rates: Learning rate of each parameter group.
        decays: Weight decay of each.
        plateau: How long the loss has not fallen.
        descent: How far it has come down.
        spike: The last departure of the loss that has not come back; None without.
        departed: The step at which each number last left the usual: "loss", "gradient", "scale", "schedule"; or at
            which a look in place has found that it has: "forward", "batch".
        drift: The steps at which tensors were first and last seen to drift towards an overflow of the forward, in this
            episode; None before one.
        ill: The steps whose loss or norm is not finite, and what became of them.
        end: The line that ends the log, once nothing more comes; None while steps may follow.
    """

    line: StepLine = field(default_factory=lambda: StepLine(step=0))
    groups: tuple[tuple[int, ...], ...] = ()
    alone: bool = True
    accepted: int = 0
    judged: bool = False
    rising: bool = False
    loss: LongCourse = field(default_factory=LongCourse)
    norm: LongCourse = field(default_factory=LongCourse)
    first_losses: Beginning = field(default_factory=Beginning)
    first_norms: Beginning = field(default_factory=Beginning)
    seconds: Course = field(default_factory=Course)
    early_seconds: float = math.inf
    memory: Course = field(default_factory=Course)
    batch: BatchCourses = field(default_factory=BatchCourses)
    scale: ScaleHistory = field(default_factory=ScaleHistory)
    loss_above: float = 0.0
    norm_above: float = 0.0
    rates: Setting = field(default_factory=Setting)
    decays: Setting = field(default_factory=Setting)
    plateau: Plateau = field(default_factory=Plateau)
    descent: Descent = field(default_factory=Descent)
    spike: Spike | None = None
    departed: dict[str, int] = field(default_factory=dict)
    drift: tuple[int, int] | None = None
    ill: IllSteps = field(default_factory=IllSteps)
    end: EndLine | None = None
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH))
    _began: int | None = None
    _highest_norm: float = 0.0
    _quiet: int = 0
    _since: int = 0
    _micro_steps: int | None = None
    _loss: float | None = None
    _norm: float | None = None

    def hear(self, line: StepLine) -> None:
        """A step more, in the order of the steps."""
        self.end = None
        skipped = self._settle_last(line)
        self._end_of_last(skipped=skipped)
        self.ill.hear(line, skipped=skipped)
        self.line = line
        if self._began is None:
            self._began = line.step
        self.scale.hear(line)
        self._hear_settings(line)
        self._hear_batch(line)
        self.judged = self.accepted - self._since >= LEAST and self._quiet == 0 and not self.batch.size.other
        loss, norm = self._loss, self._norm = _finite(line.loss), _finite(norm_of(line))
        self.loss_above = 0.0 if loss is None else self.loss.above(loss)
        self.norm_above = 0.0 if norm is None else self.norm.above(norm)
        if not line.skipped:
            if loss is not None:
                self.first_losses.add(loss)
            if norm is not None:
                self.first_norms.add(norm)
        if self.judged:
            if self.loss_above > FAR and self.matters(line.loss):
                self.departs("loss")
            if self.norm_above > FAR:
                self.departs("gradient")
        if self.scale.in_a_row and self.scale.in_a_row + self.scale.falls > 1:  # one fall is a scaler's routine
            self.departs("scale")
        if loss is not None and not line.skipped and (self.spike is not None or self.loss_above > FAR):
            self._follow_spike(line.step, loss)

    def matters(self, loss: float | None) -> bool:
        """Whether a loss is above the usual by a part of the way that training has come."""
        return loss is not None and self.descent.is_left_by(loss, self.loss.usual)

    def moves(self, norm: float) -> bool:
        """Whether a gradient norm is a part of the highest usual one: one that has all but gone rises by any factor."""
        return norm >= MATTERS * self._highest_norm

    @property
    def has_learned(self) -> bool:
        """Whether the loss has fallen, or is at rest: a policy's rises with the returns that it begins to learn of."""
        return self.descent.is_known(self.accepted, self._began or 0)

    def undoes(self, loss: float) -> bool:
        """Whether a loss that stays there takes back what was learned: it matters, and never rose as high since."""
        return self.matters(loss) and self.has_learned and loss - self.descent.lowest > self.descent.wandered

    def resumes(self) -> None:
        """Steps are counted anew from here on; what was usual still is."""
        self._end_of_last(skipped=bool(self.line.skipped))
        self.line = StepLine(step=-1)
        self.departed, self.drift, self.spike, self.ill = {}, None, None, IllSteps()

    def departs(self, what: str, step: int | None = None) -> None:
        """Notes the beginning of a departure, at this step or at an earlier one; one that goes on keeps its own."""
        step, since = self.line.step if step is None else step, self.departed.get(what)
        if since is None or step - since > _LOOK_BACK:
            self.departed[what] = step

    def drifts(self, step: int) -> None:
        """Notes that tensors of the forward were seen at a step on their way to an overflow."""
        goes_on = self.drift is not None and step - self.drift[1] < EPISODE
        self.drift = (self.drift[0] if self.drift is not None and goes_on else step, step)

    def first(self, otherwise: str = "gradient", since: int | None = None) -> str:
        """Returns what left the usual first, of what has done so up to this step and shortly before it.

        A loss is computed before the step's update: where it departs together with its gradient, the batch is what was
        new. A scale that falls follows an overflow, and so the drift towards one that was seen before.

        Args:
            otherwise: Said where nothing has left the usual.
            since: The step at which what is told began, where that was earlier.
        """
        began = self.line.step if since is None else since
        seen = {what: at for what, at in self.departed.items() if began - at <= _LOOK_BACK}
        if not seen:
            return otherwise
        earliest = min(seen.values())
        if "scale" in seen and self.drift is not None and self.drift[0] < earliest and began - self.drift[1] < EPISODE:
            return "logits"
        return next(said for what, said in _SAID.items() if seen.get(what) == earliest)

    def ends(self, end: EndLine) -> None:
        """Nothing more comes: what was not decided by the steps that followed is judged as it stands."""
        self.end = end
        self.ill.ends()

    def _settle_last(self, line: StepLine) -> bool:
        """Decide whether the step before was skipped, where only this one can tell; True if it was."""
        before = self.line
        if before.skipped is not None:
            return before.skipped
        if self._began is None:
            return False
        skipped = proves_a_skip(before, line) or self.scale.is_replaced_before(line)
        self.scale.settle(before, skipped=skipped)
        return skipped

    def _end_of_last(self, *, skipped: bool) -> None:
        """What was heard last becomes part of what is usual."""
        line = self.line
        if skipped or (line.loss is None and line.gradient_norm is None and line.seconds is None):
            return
        self.accepted += 1
        if self._quiet:
            self._quiet -= 1
        self.batch.end_of(line)
        if self._loss is not None:
            self.loss.add(self._loss, self.loss_above)
            if self.loss.count % HOP == 0:
                self.descent.follow(self.loss)
            if self._norm is not None:
                self.plateau.add(self._loss, self._norm)
        if self._norm is not None:
            self.norm.add(self._norm, self.norm_above)
            if self.norm.count % LENGTH == 0:  # rarely: it sorts a window, which most hops are spared
                self._highest_norm = max(self._highest_norm, self.norm.usual)
        self._end_of_costs(line)

    def _end_of_costs(self, line: StepLine) -> None:
        if line.seconds is not None and math.isfinite(line.seconds):
            self.seconds.add(line.seconds)
            if self.seconds.count == LENGTH:
                self.early_seconds = self.seconds.usual
        if line.memory_bytes is not None:
            self.memory.add(line.memory_bytes)

    def _hear_batch(self, line: StepLine) -> None:
        self.batch.hear(line)
        if line.micro_steps is not None:
            if self._micro_steps is not None and line.micro_steps != self._micro_steps:
                self._quiet = QUIET
                self.seconds, self.early_seconds = Course(), math.inf
            self._micro_steps = line.micro_steps
        if self.batch.size.changed:  # losses and norms of batches of another size are others
            self._since, self.spike = self.accepted, None
            self.loss, self.norm, self.seconds, self.memory = LongCourse(), LongCourse(), Course(), Course()
            self.first_losses, self.first_norms = Beginning(), Beginning()
            self.descent, self.early_seconds = self.descent.anew(), math.inf

    def _hear_settings(self, line: StepLine) -> None:
        self.decays.hear(line.weight_decays)
        self.rates.hear(line.learning_rates)
        if self.decays.rises(_AT_ONCE) or self.decays.falls(_AT_ONCE) or self.rates.rises(_AT_ONCE):
            self.departs("schedule")
        if not line.learning_rates:
            return
        rate, before = self.rates.now[0], self.rates.before[0] if self.rates.before else math.nan
        at_once = rate != before and before > 0 and rate > 0 and not 1 / _AT_ONCE < rate / before < _AT_ONCE
        if at_once and rate < _FAR_BEYOND * self.rates.highest[0]:
            self._quiet = QUIET
        self._rates.append(rate)
        self.rising = rate > self._rates[0] * 1.001

    def _follow_spike(self, step: int, loss: float) -> None:
        if self.spike is None and self.judged and self.alone and self.undoes(loss):
            self.spike = Spike(step=step, usual=self.loss.usual, limit=self._limit(), value=loss)
        if self.spike is not None:
            self.spike.above = self.spike.above + 1 if loss > self.spike.limit else 0
            if self.spike.above == 0 and step > self.spike.step:
                self.spike = None

    def _limit(self) -> float:
        """Loss three robust deviations above the usual: live.md §3.3."""
        return self.loss.value_at(3.0)


def norm_of(line: StepLine) -> float | None:
    """Returns the gradient norm without the loss scale; None where it was taken after clipping or is not known."""
    norm = line.gradient_norm
    if norm is None or line.norm_clipped:
        return None
    return norm / line.loss_scale if line.norm_scaled and line.loss_scale else norm


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
