"""The rules in use, from their formulas: each hears the log's lines and says whether it would have fired.

Warm-ups and constants are their own defaults. What clips or skips there is an alarm here: it is what would be printed.
A rule that has a state (a moving average that is fed with clipped values, a counter) keeps it as its source does.
Gradient norms are those before clipping, as their sources take them.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque

from ampdoctor.evidence.log_records import DetailLine, Line, StepLine


class Rival(ABC):
    """A rule; one for each training."""

    name = ""

    @abstractmethod
    def add(self, line: Line) -> bool:
        """Whether it fires at this line."""


class OnSteps(Rival):
    """A rule on each step's loss and gradient norm."""

    def add(self, line: Line) -> bool:
        return isinstance(line, StepLine) and self.step(line.loss, line.gradient_norm)

    @abstractmethod
    def step(self, loss: float | None, norm: float | None) -> bool:
        """Whether it fires at this step."""


class ZClip(OnSteps):
    """ZClip (arXiv 2504.02507, bluorion-com/ZClip): z = (g - mean) / (std + 1e-6) > 2.5; alpha 0.97, 25 steps to begin.

    A norm that is above is clipped to mean + 2.5 std / (z / 2.5), and that is what the averages get.
    """

    name = "ZClip"

    def __init__(self) -> None:
        self._first: list[float] = []
        self._mean = self._variance = math.nan

    def step(self, loss: float | None, norm: float | None) -> bool:  # noqa: ARG002 - a rule on the norm
        if norm is None or not math.isfinite(norm):
            return norm is not None
        if math.isnan(self._mean):
            self._first.append(norm)
            if len(self._first) == 25:
                self._mean, self._variance = statistics.fmean(self._first), statistics.pvariance(self._first)
            return False
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + 1e-6)
        if fires := z > 2.5:
            norm = self._mean + 2.5 * deviation / (z / 2.5)
        self._mean = 0.97 * self._mean + 0.03 * norm
        self._variance = 0.97 * self._variance + 0.03 * (norm - self._mean) ** 2
        return fires


class SixSigma(OnSteps):
    """OLMo-core's SkipStepOptimizer, levanter's skip_bad_steps: loss or norm > mean + 6 std of 128, from 64 on.

    The window takes every value, spikes and NaN too (OLMo's formulas).
    """

    name = "OLMo, levanter: 6 sigma"

    def __init__(self) -> None:
        self._windows: tuple[deque[float], deque[float]] = (deque(maxlen=128), deque(maxlen=128))

    def step(self, loss: float | None, norm: float | None) -> bool:
        fires = False
        for value, window in zip((loss, norm), self._windows, strict=True):
            if value is None:
                continue
            if len(window) >= 64:
                mean = sum(window) / len(window)
                deviation = math.sqrt(sum((v - mean) ** 2 for v in window) / (len(window) - 1))
                fires |= not value <= mean + 6 * deviation
            window.append(value)
        return fires


class KillLossSpike(OnSteps):
    """llm-foundry's KillLossSpike: 5 losses in a row >= twice the mean of 100; or half of these above the cap.

    The cap is the largest loss of the first 100 steps, 10 at most, and judged from step 200 on. The window is 100
    steps, as of a training shorter than 2,000; a log does not say how long its training will be.
    """

    name = "llm-foundry KillLossSpike"

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=100)
        self._outliers, self._seen, self._cap = 0, 0, math.nan

    def step(self, loss: float | None, norm: float | None) -> bool:  # noqa: ARG002 - a rule on the loss
        if loss is None:
            return False
        fires = False
        if len(self._window) == 100:
            if math.isnan(self._cap):
                self._cap = min(max(self._window), 10.0)
            self._outliers = self._outliers + 1 if loss >= 2 * sum(self._window) / 100 else 0
            high = self._seen >= 200 and sum(v > self._cap for v in self._window) >= 50
            fires = self._outliers > 4 or high
        self._window.append(loss)
        self._seen += 1
        return fires


class SpikeDetection(OnSteps):
    """Lightning's SpikeDetection: |loss - mean of 10| >= 2 |mean|, and a worse loss than the last; or not finite.

    It begins with the second step. A spike enters neither the mean nor the last loss.
    """

    name = "Lightning SpikeDetection"

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=10)
        self._last = 0.0

    def step(self, loss: float | None, norm: float | None) -> bool:  # noqa: ARG002 - a rule on the loss
        if loss is None:
            return False
        if not math.isfinite(loss):
            return True
        if self._window:
            mean = sum(self._window) / len(self._window)
            if loss > self._last and abs(loss - mean) >= 2 * abs(mean):
                return True
        self._window.append(loss)
        self._last = loss
        return False


class FactorTen(OnSteps):
    """Megatron's is_unexpectedly_large: loss or norm >= 10 times the largest of the first 100; NaN and Inf too."""

    name = "Megatron: factor 10"

    def __init__(self) -> None:
        self._seen: tuple[list[float], list[float]] = ([], [])

    def step(self, loss: float | None, norm: float | None) -> bool:
        fires = False
        for value, first in zip((loss, norm), self._seen, strict=True):
            if value is None:
                continue
            if not math.isfinite(value):
                fires = True
            elif len(first) < 100:
                first.append(abs(value))
            else:
                fires |= abs(value) >= 10 * max(first)
        return fires


class LossWatchDog(OnSteps):
    """Axolotl's loss watchdog: 3 losses in a row above a threshold; NaN is above none.

    The threshold is the user's; twice the first loss, as is usually advised.
    """

    name = "axolotl watchdog"

    def __init__(self) -> None:
        self._threshold, self._violations = math.nan, 0

    def step(self, loss: float | None, norm: float | None) -> bool:  # noqa: ARG002 - a rule on the loss
        if loss is None:
            return False
        if math.isnan(self._threshold):
            self._threshold = 2 * abs(loss)
        self._violations = self._violations + 1 if loss > self._threshold else 0
        return self._violations >= 3


class Turbulence(OnSteps):
    """msprobe's AnomalyTurbulence on the gradient norm: |x| > 1.5 times its average, alpha 0.99."""

    name = "msprobe turbulence"

    def __init__(self) -> None:
        self._average = math.nan

    def step(self, loss: float | None, norm: float | None) -> bool:  # noqa: ARG002 - a rule on the norm
        if norm is None or not math.isfinite(norm):
            return norm is not None
        fires = not math.isnan(self._average) and norm > 1.5 * self._average
        self._average = norm if math.isnan(self._average) else 0.99 * self._average + 0.01 * norm
        return fires


class ZeroShare(Rival):
    """The folk rule: more than 5 % of all gradients are zero, in a step whose tensors were looked at."""

    name = "5 % of gradients zero"

    def add(self, line: Line) -> bool:
        if not isinstance(line, DetailLine):
            return False
        gradients = [
            (t.zero_share, t.elements or 0) for t in line.tensors if t.role == "gradient" and t.zero_share is not None
        ]
        elements = sum(count for _, count in gradients)
        return elements > 0 and sum(share * count for share, count in gradients) > 0.05 * elements


RIVALS: tuple[type[Rival], ...] = (
    ZClip, SixSigma, KillLossSpike, SpikeDetection, FactorTen, LossWatchDog, Turbulence, ZeroShare,
)  # fmt: skip
