"""What a rule on steps sees: the numbers of one optimizer over its steps, its loss scale, its losses."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ampdoctor.diagnosis.health.rolling import (
    HOP,
    LEAST,
    LENGTH,
    MATTERS,
    BatchCourses,
    Beginning,
    Course,
    Descent,
    LongCourse,
)
from ampdoctor.evidence.log_records import EndLine, StepLine

# Steps whose loss or gradient norm is not finite: whether the weights took them, as the steps behind them show.
#
# Most logs do not say whether a step was skipped. Weights that took a NaN never give a finite loss again: a finite loss
# behind such a step, or a loss scale that falls right behind it, proves that the scaler skipped it.


LEAST_ROWS = 3
"""Rows with a norm that is not finite, one after another: AMP703's, one or two are skipped steps as there should be."""
HOPELESS = 8
"""Steps over which they lie: AMP703's, eight halvings of the loss scale."""
SETTLING = 40
"""The same from the log's first step on: from the highest initial scale, 2^32, down to 1 are 32."""


@dataclass(slots=True)
class IllSteps:
    """What became of the steps whose loss or norm is not finite.

    Attributes:
        waiting: The first one of which nothing says yet whether the weights took it; None without one.
        lost: The first of those that the weights took, at the line at which that is known; None at all others.
        last: The log ends, and what waits will not be decided.
    """

    waiting: StepLine | None = None
    lost: StepLine | None = None
    last: bool = False
    _taken: bool = False  # those before this one, in a row
    _rows: int = 0  # that wait
    _seen_finite: bool = False

    def hear(self, line: StepLine, *, skipped: bool) -> None:
        """A step more.

        Args:
            line: The step.
            skipped: Whether the step before it was skipped, as the log or this line says.
        """
        self.lost = None
        if skipped:
            self.waiting, self._rows = None, 0
        if not is_ill(line) or line.skipped:
            if line.loss is not None or line.gradient_norm is not None:
                self._taken, self.waiting, self._rows = False, None, 0
                self._seen_finite = True
        elif self._taken:
            return
        elif line.skipped is False:
            self._lose(line)
        else:
            self._wait(line)

    def ends(self) -> None:
        """Nothing more comes."""
        self.lost, self.last = None, True

    def _wait(self, line: StepLine) -> None:
        first = self.waiting
        if first is None:
            self.waiting, self._rows = line, 1
            return
        self._rows += 1
        span = line.step - first.step + 1
        hopeless = self._rows >= LEAST_ROWS and span >= (HOPELESS if self._seen_finite else SETTLING)
        if hopeless or (line.loss is not None and not math.isfinite(line.loss)):
            self._lose(first)

    def _lose(self, line: StepLine) -> None:
        self.lost, self._taken, self.waiting, self._rows = line, True, None, 0


def is_ill(line: StepLine) -> bool:
    """Whether a step's loss or gradient norm is not finite."""
    return any(value is not None and not math.isfinite(value) for value in (line.loss, line.gradient_norm))


def proves_a_skip(before: StepLine, line: StepLine) -> bool:
    """Whether a step's line proves that the one before it was skipped, of which the log does not say it.

    Args:
        before: The step before, in the order of the log.
        line: The step; where the log leaves steps out between the two, its loss scale proves nothing.
    """
    scales = before.loss_scale, line.loss_scale
    if scales[0] is not None and scales[1] is not None and line.step == before.step + 1 and scales[1] < scales[0]:
        return True
    if not is_ill(before):
        return False
    told = line.gradient_norm if line.loss is None else line.loss
    return told is not None and math.isfinite(told)


# The loss scale of one optimizer over its steps, and which of them were skipped.


_NO_GROWTH = 8.0
"""Factor from one step to the next that no growth makes: torch's is 2 by default, and 4 the largest that is in use."""
_MOST_LOSSES = 400
"""Losses of a run of skipped steps that are kept."""


@dataclass(slots=True)
class ScaleHistory:
    """A loss scale over the steps.

    Attributes:
        now: The present one; null before the first.
        first: The first one.
        highest: The highest at which a step was taken.
        falls: How often it has fallen since it last grew, not counting the falls before the first taken step.
        fallen: Binades by which it has fallen since then.
        taken: Steps that were taken.
        skipped: Steps that were skipped.
        in_a_row: Skipped steps up to this one.
        since: The first of these.
        until: The last of these.
        told: The log itself says of each of these that it was skipped.
        losses: Of these, where the log does not say it.
        unmoved: Those of them, up to this one, that have left the scale where it was.
        growths: How often it has grown.
        settled: A step has been taken with this scaler.
        anew: How often it rose as no scaler lets it rise: at once after a skipped step, or back to its first value.
        is_new: It did so with this step.
        lengths: Taken steps between the last falls, the newest at the end.
        wrong: What the log calls the scale of the last step that has one, where no scale is that; null else.
        wrong_since: The first of the steps with such a one, in a row.
        wrong_rows: How many they are.
        wrong_before: The most of them that a scale has followed.
    """

    now: float | None = None
    first: float | None = None
    highest: float = 0.0
    falls: int = 0
    fallen: float = 0.0
    taken: int = 0
    skipped: int = 0
    in_a_row: int = 0
    since: int = 0
    until: int = 0
    told: bool = True
    losses: list[float] = field(default_factory=list)
    unmoved: int = 0
    growths: int = 0
    settled: bool = False
    anew: int = 0
    is_new: bool = False
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    since_fall: int = 0
    wrong: float | None = None
    wrong_since: int = 0
    wrong_rows: int = 0
    wrong_before: int = 0
    _step: int = -1

    def hear(self, line: StepLine) -> None:
        """A step more; the one before it is settled."""
        self.is_new = False
        scale = self._heard(line)
        if scale is not None:
            before, self.now = self.now, scale
            self.unmoved = self.unmoved + 1 if line.skipped and scale == before else 0
            if before is None:
                self.first = scale
                if self.settled:  # the steps before were taken with it, and the log did not say so
                    self.highest = scale
            else:
                self._move(line, before, scale)
        self._step = line.step
        if line.skipped is not None:
            self.settle(line, skipped=line.skipped)

    def _heard(self, line: StepLine) -> float | None:
        """Returns a step's scale; None for one that no scaler has."""
        scale = line.loss_scale
        if scale is None:
            return None
        if scale > 0 and scale < math.inf:
            self.wrong_before = max(self.wrong_before, self.wrong_rows)
            self.wrong, self.wrong_rows = None, 0
            return scale
        if self.wrong is None:
            self.wrong_since = line.step
        self.wrong = scale
        self.wrong_rows += 1
        return None

    def settle(self, line: StepLine, *, skipped: bool) -> None:
        """It is known whether a step was skipped: at once, or by the step behind it."""
        if not skipped:
            self.taken += 1
            self.in_a_row, self.told = 0, True
            self.losses.clear()
            self.since_fall += 1
            self.settled = True
            if line.loss_scale is not None and self.highest < line.loss_scale < math.inf:
                self.highest = line.loss_scale
            return
        if not self.in_a_row:
            self.since = line.step
        self.until = line.step
        self.skipped += 1
        self.in_a_row += 1
        self.told = self.told and line.skipped is True
        if not line.skipped and line.loss is not None and len(self.losses) < _MOST_LOSSES:
            self.losses.append(line.loss)

    def is_replaced_before(self, line: StepLine) -> bool:
        """Whether the scale leaps back to its first value behind a run of skipped steps, which the last one ends."""
        scale, now = line.loss_scale, self.now
        leaps = scale is not None and now is not None and scale == self.first and scale >= _NO_GROWTH * now
        return leaps and self.in_a_row > 0 and line.step == self._step + 1

    def _move(self, line: StepLine, before: float, scale: float) -> None:
        if scale > before and line.step == self._step + 1 and (self.in_a_row or self._leaps(before, scale)):
            self.anew += 1
            self.is_new = True
            self.falls, self.fallen, self.settled = 0, 0.0, False
        elif not self.settled:
            return
        elif scale < before:
            self.falls += 1
            self.fallen += math.log2(before / scale)
            self.lengths.append(self.since_fall)
            self.since_fall = 0
        elif scale > before:
            self.growths += 1
            self.falls, self.fallen = 0, 0.0

    def _leaps(self, before: float, scale: float) -> bool:
        return scale == self.first and scale >= _NO_GROWTH * before


QUIET = 25
"""Accepted steps without a judgement after the batch or the learning rate has changed at once."""
_NO_SCHEDULE = 1.5
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
        if self.decays.rises(_NO_SCHEDULE) or self.decays.falls(_NO_SCHEDULE) or self.rates.rises(_NO_SCHEDULE):
            self.departs("schedule")
        if not line.learning_rates:
            return
        rate, before = self.rates.now[0], self.rates.before[0] if self.rates.before else math.nan
        at_once = rate != before and before > 0 and rate > 0 and not 1 / _NO_SCHEDULE < rate / before < _NO_SCHEDULE
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
