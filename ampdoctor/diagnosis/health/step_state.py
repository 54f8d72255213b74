"""The evidence of rules on steps: the numbers of one optimizer over its steps, its loss scale, its losses."""

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
    LongRollingStats,
    LossDescent,
    RollingStats,
)
from ampdoctor.evidence.log_records import EndLine, StepLine

# -- steps with a non-finite loss or gradient norm: did the weights take them? --
#
# Most logs do not record whether a step was skipped. Weights that took a NaN never give a finite loss again. So a
# finite loss after such a step, or a loss scale that falls right after it, proves that the scaler skipped it.


LEAST_ROWS = 3  # successive rows with a non-finite norm: one or two are ordinary skipped steps
HOPELESS = 8  # steps that these rows span: eight halvings of the loss scale
SETTLING = 40  # the same from the log's first step on: from the highest initial scale, 2^32, down to 1 are 32


@dataclass(slots=True)
class IllSteps:
    """Steps with a non-finite loss or norm, and whether the weights took them."""

    waiting: StepLine | None = None  # the first step that is not decided yet
    lost: StepLine | None = None  # the first step that the weights took; set only at the line that proves it
    last: bool = False  # the log has ended, and `waiting` stays undecided
    _taken: bool = False  # the weights took the steps before this one
    _rows: int = 0  # rows since `waiting`
    _seen_finite: bool = False

    def add(self, line: StepLine, *, skipped: bool) -> None:
        """Adds a step; `skipped` is whether the step before it was skipped, according to the log or this line."""
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

    @property
    def stand(self) -> bool:
        """Whether no finite step follows the last of them."""
        return self._taken or self.waiting is not None

    def ends(self) -> None:
        """Ends the log."""
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
    """Returns whether a step's loss or gradient norm is not finite."""
    loss, norm = line.loss, line.gradient_norm
    return not ((loss is None or math.isfinite(loss)) and (norm is None or math.isfinite(norm)))


def proves_a_skip(before: StepLine, line: StepLine) -> bool:
    """Returns whether a step's line proves that the step before it was skipped, where the log does not record it.

    A lower loss scale proves it only if no steps are missing between the two lines.
    """
    scales = before.loss_scale, line.loss_scale
    if scales[0] is not None and scales[1] is not None and line.step == before.step + 1 and scales[1] < scales[0]:
        return True
    if not is_ill(before):
        return False
    told = line.gradient_norm if line.loss is None else line.loss
    return told is not None and math.isfinite(told)


# -- gradient norms that are exactly zero, and losses that are exactly equal --


MOST_LOSSES = 10_000  # losses that are kept while the norms are zero: the last ones


@dataclass(slots=True)
class ZeroNorms:
    """The rows since the last gradient norm that was finite and not zero."""

    rows: int = 0  # with a norm
    zeros: int = 0  # of these, with a norm of exactly 0
    first: int = 0  # the step of the first zero, and that of the last
    last: int = 0
    before: float | None = None  # the last finite norm that was not zero
    coarse: bool = True  # no finite norm had more than four decimals
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MOST_LOSSES))  # since the first zero

    def add(self, line: StepLine, norm: float | None, loss: float | None) -> None:
        """Adds a step with its norm, and with its loss where that is finite."""
        if norm is not None and 0 < abs(norm) < math.inf:
            self.before = norm
            if self.coarse:
                self.coarse = round(norm, 4) == norm
            if self.rows:
                self.rows = self.zeros = 0
                self.losses.clear()
            return
        if norm is not None:
            self.rows += 1
            if norm == 0:
                self.first = self.first if self.zeros else line.step
                self.zeros, self.last = self.zeros + 1, line.step
        if self.zeros and loss is not None:
            self.losses.append((line.step, loss))


@dataclass(slots=True)
class EqualLosses:
    """The last losses, as far back as they are equal to the last digit."""

    value: float = math.nan
    rows: int = 0
    since: int = 0  # the first step
    resting: bool = False  # the learning rate is 0 in all of these rows, or the gradient norm is
    rounded: bool = True  # no loss of the run had more than four decimals
    _rates_rest: bool = False
    _norms_rest: bool = False

    def add(self, line: StepLine) -> None:
        """Adds a step."""
        loss = line.loss
        if loss is None:
            return
        if self.rounded:
            self.rounded = math.isfinite(loss) and round(loss, 4) == loss
        if loss == self.value:
            self.rows += 1
        else:
            self.value, self.rows, self.since = loss, 1, line.step
            self._rates_rest = self._norms_rest = True
        self._rates_rest = self._rates_rest and line.learning_rates[:1] == (0.0,)
        self._norms_rest = self._norms_rest and line.gradient_norm == 0
        self.resting = self._rates_rest or self._norms_rest


# -- the loss scale of one optimizer, and its skipped steps --


_NO_GROWTH = 8.0
"""No growth from one step to the next reaches this factor: torch's is 2 by default, and the largest in use is 4."""
_REST = 10
"""Steps taken in a row that end a first descent: far above a fitting scale nearly every step falls, but for a few by
chance or hysteresis."""
_MOST_LOSSES = 400  # losses that are kept of a run of skipped steps


@dataclass(slots=True)
class ScaleHistory:
    """A loss scale over the steps."""

    now: float | None = None
    first: float | None = None
    highest: float = 0.0  # at which a step was taken
    falls: int = 0  # since it last grew, without those of a first descent, which a rest ends
    fallen: float = 0.0  # log2 of the factor by which it fell since then
    taken: int = 0
    skipped: int = 0
    in_a_row: int = 0  # skipped steps up to this one, from `since` to `until`
    since: int = 0
    until: int = 0
    told: bool = True  # the log itself records each of these as skipped
    losses: list[float] = field(default_factory=list)  # of these steps, where the log does not record it
    unmoved: int = 0  # skipped steps in a row that left the scale as it was
    growths: int = 0
    settled: bool = False  # a step was taken with this scaler
    rested: bool = False  # so many in a row that its first descent is over
    anew: int = 0  # how often it rose as no scaler does: right after a skipped step, or back to its first value
    is_new: bool = False  # it did so at this step
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=8))  # taken steps between the last falls
    since_fall: int = 0
    wrong: float | None = None  # the logged scale of the last step, if it is not positive and finite
    wrong_since: int = 0  # the first of such steps in a row
    wrong_rows: int = 0
    wrong_before: int = 0  # the longest such run after which a valid scale followed
    _step: int = -1

    def add(self, line: StepLine) -> None:
        """Adds a step; `settle` was called for the one before."""
        self.is_new = False
        scale = line.loss_scale
        if scale is not None and self._takes(scale, line.step):
            before, self.now = self.now, scale
            self.unmoved = self.unmoved + 1 if line.skipped and scale == before else 0
            if before is None:
                self.first = scale
                if self.settled:  # the steps before were taken with it, although the log did not record it
                    self.highest = scale
            elif before != scale:
                self._move(line, before, scale)
        self._step = line.step
        if line.skipped is not None:
            self.settle(line, skipped=line.skipped)

    def _takes(self, scale: float, step: int) -> bool:
        """Takes a step's scale; returns whether it is positive and finite."""
        if 0 < scale < math.inf:
            if self.wrong_rows:
                self.wrong_before = max(self.wrong_before, self.wrong_rows)
                self.wrong, self.wrong_rows = None, 0
            return True
        if self.wrong is None:
            self.wrong_since = step
        self.wrong = scale
        self.wrong_rows += 1
        return False

    def settle(self, line: StepLine, *, skipped: bool) -> None:
        """Records whether a step was skipped: at once, or when the next step shows it."""
        if not skipped:
            self.taken += 1
            self.in_a_row, self.told = 0, True
            self.losses.clear()
            self.since_fall += 1
            self.settled, self.rested = True, self.rested or self.since_fall >= _REST
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
        """Returns whether the scale jumps back to its first value right after a run of skipped steps."""
        scale, now = line.loss_scale, self.now
        leaps = scale is not None and now is not None and scale == self.first and scale >= _NO_GROWTH * now
        return leaps and self.in_a_row > 0 and line.step == self._step + 1

    def _move(self, line: StepLine, before: float, scale: float) -> None:
        if scale > before and line.step == self._step + 1 and (self.in_a_row or self._leaps(before, scale)):
            self.anew += 1
            self.is_new = True
            self.falls, self.fallen, self.settled, self.rested, self.since_fall = 0, 0.0, False, False, 0
        elif not self.settled:
            return
        elif scale < before:
            if self.rested:
                self.falls += 1
                self.fallen += math.log2(before / scale)
            self.lengths.append(self.since_fall)
            self.since_fall = 0
        elif scale > before:
            self.growths += 1
            self.falls, self.fallen = 0, 0.0

    def _leaps(self, before: float, scale: float) -> bool:
        return scale == self.first and scale >= _NO_GROWTH * before


QUIET = 25  # accepted steps that are not judged after a sudden change of the batch or the learning rate
_NO_SCHEDULE = 1.5  # larger than the factor per step of any smooth schedule
FAR = 6.0  # robust deviations from which a number is not usual: as in OLMo and levanter
_FAR_BEYOND = 10.0
"""A larger jump of the learning rate, over all rates before, is no restart: after a restart, losses recover."""
_LOOK_BACK = 32  # steps within which two departures belong together
EPISODE = 256  # steps without the same finding after which it is reported again: a lasting problem is one alert
_SAID = {
    "schedule": "optimizer",
    "batch": "data",
    "forward": "forward",
    "loss": "loss",
    "gradient": "gradient",
    "scale": "scale",
}
"""What moved first, for each number that departed; of several in one step, the first in this order."""


@dataclass(slots=True)
class Spike:
    """A loss that left the usual range."""

    step: int
    usual: float  # the loss before it
    limit: float  # a loss above it has not come back
    value: float  # the loss at that step
    above: int = 0  # steps since the spike above the limit, in a row


@dataclass(slots=True)
class Setting:
    """A setting of an optimizer, one value per parameter group."""

    now: tuple[float, ...] = ()
    before: tuple[float, ...] = ()  # in the step before; empty where the number of groups has changed
    highest: tuple[float, ...] = ()  # the highest of each group before this step
    moved: bool = False  # in this step

    def add(self, values: tuple[float, ...]) -> None:
        """Adds a step."""
        if values == self.now == self.before:
            return
        self.moved = values != self.now
        if len(values) != len(self.now):
            self.now, self.before, self.highest = values, (), values
            return
        if self.before != self.now:
            self.highest = tuple(map(max, self.highest, self.now))
        self.before, self.now = self.now, values

    def rises(self, factor: float) -> bool:
        """Returns whether a group's value is more than `factor` times the last one, where one has moved."""
        return any(now > factor * before for before, now in zip(self.before, self.now, strict=False))

    def falls(self, factor: float) -> bool:
        """Returns whether a group's value fell by more than `factor`, or below zero, where one has moved."""
        return any(now < before / factor for before, now in zip(self.before, self.now, strict=False))


@dataclass(slots=True)
class StepState:
    """A step and the state before it: the evidence of rules on steps. The next step changes it.

    Attributes:
        groups: For each of the optimizer's groups, the indices of its parameters' names, where they are known.
        alone: No other optimizer steps in this run. Where two compete, as in a GAN, one's gain is the other's loss.
        accepted: Accepted steps before this one.
        judged: Enough steps came before this one, and nothing has changed suddenly.
        loss, norm, seconds, memory: Rolling statistics, without this step's value; `norm` is before clipping.
        first_losses, first_norms: The first values, this step's included.
        early_seconds: The usual time of a step in the first full window with this batch size; inf before.
        loss_above, norm_above: How far this step's value is above the usual, in robust deviations.
        spike: The last spike of the loss that has not come back.
        departed: The step at which each number last left the usual: "loss", "gradient", "scale", "schedule"; "forward"
            and "batch" where a diagnosis of the step found it.
        drift: The first and last step at which tensors drifted towards an overflow of the forward, in this episode.
    """

    line: StepLine = field(default_factory=lambda: StepLine(step=0))
    groups: tuple[tuple[int, ...], ...] = ()
    alone: bool = True
    accepted: int = 0
    judged: bool = False
    rising: bool = False
    loss: LongRollingStats = field(default_factory=LongRollingStats)
    norm: LongRollingStats = field(default_factory=LongRollingStats)
    first_losses: Beginning = field(default_factory=Beginning)
    first_norms: Beginning = field(default_factory=Beginning)
    seconds: RollingStats = field(default_factory=RollingStats)
    early_seconds: float = math.inf
    memory: RollingStats = field(default_factory=RollingStats)
    batch: BatchCourses = field(default_factory=BatchCourses)
    scale: ScaleHistory = field(default_factory=ScaleHistory)
    loss_above: float = 0.0
    norm_above: float = 0.0
    rates: Setting = field(default_factory=Setting)
    decays: Setting = field(default_factory=Setting)
    descent: LossDescent = field(default_factory=LossDescent)
    spike: Spike | None = None
    departed: dict[str, int] = field(default_factory=dict)
    drift: tuple[int, int] | None = None
    ill: IllSteps = field(default_factory=IllSteps)
    zeros: ZeroNorms = field(default_factory=ZeroNorms)
    equal: EqualLosses = field(default_factory=EqualLosses)
    end: EndLine | None = None
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=LENGTH))
    _began: int | None = None
    _highest_norm: float = 0.0
    _quiet: int = 0
    _since: int = 0
    _micro_steps: int | None = None
    _loss: float | None = None
    _norm: float | None = None

    def add(self, line: StepLine) -> None:
        """Adds a step, in the order of the steps."""
        self.end = None
        skipped = self._settle_last(line) if self.line.skipped is None else self.line.skipped
        self._end_of_last(skipped=skipped)
        loss, norm = _finite(line.loss), line.norm
        self.ill.add(line, skipped=skipped)
        self.zeros.add(line, norm, loss)
        self.equal.add(line)
        self.line = line
        if self._began is None:
            self._began = line.step
        self.scale.add(line)
        self._add_settings(line)
        self._add_batch(line)
        self.judged = self.accepted - self._since >= LEAST and self._quiet == 0 and not self.batch.size.other
        norm = _finite(norm)
        self._loss, self._norm = loss, norm
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
        """Returns whether a loss is above the usual by `MATTERS` of the loss's fall so far."""
        return loss is not None and self.descent.is_left_by(loss, self.loss.usual)

    def moves(self, norm: float) -> bool:
        """Returns whether a gradient norm is relevant beside the highest usual one: a tiny norm rises by any factor."""
        return norm >= MATTERS * self._highest_norm

    @property
    def has_learned(self) -> bool:
        """Whether the loss has fallen, or is at rest. In reinforcement learning, it rises at first with the returns."""
        return self.descent.is_known(self.accepted, self._began or 0)

    def reverses_progress(self, loss: float) -> bool:
        """Returns whether a lasting loss of this height means forgetting: it matters, and is a new highest rise."""
        return self.matters(loss) and self.has_learned and loss - self.descent.lowest > self.descent.max_rise

    def resumes(self) -> None:
        """Continues with a new process, whose steps are numbered anew; what was usual stays."""
        self._end_of_last(skipped=bool(self.line.skipped))
        self.line = StepLine(step=-1)
        self.departed, self.drift, self.spike, self.ill = {}, None, None, IllSteps()

    def departs(self, what: str, step: int | None = None) -> None:
        """Records that a number left the usual, now by default; a lasting departure keeps its first step."""
        step, since = self.line.step if step is None else step, self.departed.get(what)
        if since is None or step - since > _LOOK_BACK:
            self.departed[what] = step

    def drifts(self, step: int) -> None:
        """Records a step at which tensors of the forward drifted towards an overflow."""
        goes_on = self.drift is not None and step - self.drift[1] < EPISODE
        self.drift = (self.drift[0] if self.drift is not None and goes_on else step, step)

    def first(self, otherwise: str = "gradient", since: int | None = None) -> str:
        """Returns what left the usual first, among the departures up to this step, or `since`, and shortly before.

        A batch that is to blame is said only where the log shows it. A loss scale falls after an overflow, and so
        after a drift towards it that was seen before.
        """
        began = self.line.step if since is None else since
        seen = {what: at for what, at in self.departed.items() if began - at <= _LOOK_BACK}
        if not seen:
            return otherwise
        earliest = min(seen.values())
        if "scale" in seen and self.drift is not None and self.drift[0] < earliest and began - self.drift[1] < EPISODE:
            return "logits"
        said = next(said for what, said in _SAID.items() if seen.get(what) == earliest)
        return "both" if said == "loss" and seen.get("gradient") == earliest else said

    def ends(self, end: EndLine) -> None:
        """Ends the log: what no later step decided is judged as it is."""
        self.end = end
        self.ill.ends()

    def _settle_last(self, line: StepLine) -> bool:
        """Decides from this line whether the last step was skipped, as its own line does not record it; returns it."""
        before = self.line
        if self._began is None:
            return False
        skipped = proves_a_skip(before, line) or self.scale.is_replaced_before(line)
        self.scale.settle(before, skipped=skipped)
        return skipped

    def _end_of_last(self, *, skipped: bool) -> None:
        """Adds the numbers of the last step to the usual ones."""
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
            self.norm.add(self._norm, self.norm_above)
            if self.norm.count % LENGTH == 0:  # rare: it sorts a window that most hops do not need
                self._highest_norm = max(self._highest_norm, self.norm.usual)
        if line.seconds is not None and math.isfinite(line.seconds):
            self.seconds.add(line.seconds)
            if self.seconds.count == LENGTH:
                self.early_seconds = self.seconds.usual
        if line.memory_bytes is not None:
            self.memory.add(line.memory_bytes)

    def _add_batch(self, line: StepLine) -> None:
        self.batch.add(line)
        if line.micro_steps is not None:
            if self._micro_steps is not None and line.micro_steps != self._micro_steps:
                self._quiet = QUIET
                self.seconds, self.early_seconds = RollingStats(), math.inf
            self._micro_steps = line.micro_steps
        if self.batch.size.changed:  # batches of another size have other losses and norms
            self._since, self.spike = self.accepted, None
            self.loss, self.norm = LongRollingStats(), LongRollingStats()
            self.seconds, self.memory = RollingStats(), RollingStats()
            self.first_losses, self.first_norms = Beginning(), Beginning()
            self.descent, self.early_seconds = self.descent.anew(), math.inf

    def _add_settings(self, line: StepLine) -> None:
        decays, rates = self.decays, self.rates
        decays.add(line.weight_decays)
        rates.add(line.learning_rates)
        if (decays.moved and (decays.rises(_NO_SCHEDULE) or decays.falls(_NO_SCHEDULE))) or (
            rates.moved and rates.rises(_NO_SCHEDULE)
        ):
            self.departs("schedule")
        if not line.learning_rates:
            return
        rate = line.learning_rates[0]
        if rates.moved and rates.before:
            before = rates.before[0]
            at_once = rate != before and before > 0 and rate > 0 and not 1 / _NO_SCHEDULE < rate / before < _NO_SCHEDULE
            if at_once and rate < _FAR_BEYOND * rates.highest[0]:
                self._quiet = QUIET
        self._rates.append(rate)
        self.rising = rate > self._rates[0] * 1.001

    def _follow_spike(self, step: int, loss: float) -> None:
        if self.spike is None and self.judged and self.alone and self.reverses_progress(loss):
            limit = self.loss.value_at(3.0)  # three robust deviations above the usual
            self.spike = Spike(step=step, usual=self.loss.usual, limit=limit, value=loss)
        if self.spike is not None:
            self.spike.above = self.spike.above + 1 if loss > self.spike.limit else 0
            if self.spike.above == 0 and step > self.spike.step:
                self.spike = None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
