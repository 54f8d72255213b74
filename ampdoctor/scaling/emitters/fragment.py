"""An emitter's request and result, and remarks that several emitters share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ampdoctor.evidence.targets import Framework
from ampdoctor.numerics import FORMATS
from ampdoctor.scaling.settings import ScalerSettings

Precision = Literal["fp16", "bf16", "fp32"]
Language = Literal["python", "json", "shell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """Settings in the terms of a framework.

    Attributes:
        framework: The framework.
        language: The text's language: Python to paste after the model has been built, JSON to merge into a
            configuration, or a bash array of flags.
        text: The fragment; ends with a newline. `model`, `optimizer`, `loss_fn` and `batch` are the user's own.
        notes: How the framework deviates from the settings, and what must be watched, a sentence each.
    """

    framework: Framework
    language: Language
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The result of one emitter.

    Attributes:
        lines: Lines in its language, without newlines at their ends.
        notes: See `Emitted`.
    """

    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request to an emitter.

    Attributes:
        settings: Checked: a positive finite scale, factors that grow and back off, whole counts.
        real: The settings as the framework will run them.
        precision: The run's compute precision; the settings matter only for fp16.
        islands: Names of modules that compute in fp32 nevertheless; () if the whole run does.
        loss_in_half: The loss is fp16 where it is scaled.
        device: Device type of the training.
    """

    settings: ScalerSettings
    real: ScalerSettings
    precision: Precision
    islands: tuple[str, ...]
    loss_in_half: bool
    device: str

    def differences(self) -> Iterator[str]:
        """Yields a sentence for each setting, except the floor, that the framework runs with another value."""
        wanted, real = self.settings, self.real
        if real.scale != wanted.scale:
            yield f"the scale starts at {real.scale:g} instead of {wanted.scale:g}, which cannot be said there"
        if real.growth_factor != wanted.growth_factor:
            yield f"the growth factor is fixed at {real.growth_factor:g} there, instead of {wanted.growth_factor:g}"
        if real.backoff_factor != wanted.backoff_factor:
            yield f"the backoff factor is fixed at {real.backoff_factor:g} there, instead of {wanted.backoff_factor:g}"
        if real.hysteresis < wanted.hysteresis:
            yield f"there is no hysteresis there: the first overflow backs off, instead of the {_th(wanted.hysteresis)}"

    def half_loss(self, why: str, remedy: str) -> Iterator[str]:
        """Yields a remark if the loss is fp16 where it is scaled.

        Args:
            why: What the framework does with a half loss.
            remedy: What to write instead.
        """
        if self.loss_in_half:
            limit = FORMATS["fp16"].overflow_at / self.real.scale
            yield f"{why}: at this scale one of {limit:g} or more becomes inf, so {remedy}"


def number(value: float) -> str:
    """Returns a number for a command line: a whole one without a point, so that integer options accept it."""
    return str(int(value)) if value == int(value) else repr(value)


def _th(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")
