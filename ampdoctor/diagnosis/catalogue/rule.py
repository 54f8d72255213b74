"""What a rule is: what stands behind a finding's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ampdoctor.diagnosis.catalogue.page import Page, read_page
from ampdoctor.evidence.report import Severity
from ampdoctor.evidence.thresholds.threshold import Threshold

Command: TypeAlias = Literal["scan", "bisect-nan", "profile", "recommend"]

SCANNED: tuple[Command, ...] = ("scan",)
"""A replay judges the checkpoint that it loads as well, where it is given one: what it does not say of it, it may not
have looked at."""
REPLAYED: tuple[Command, ...] = ("bisect-nan", "recommend")
MEASURED: tuple[Command, ...] = ("profile", "recommend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the catalogue; what a person reads about it is its page.

    Attributes:
        code: Stable code ("AMP101"); it never changes its meaning.
        name: Stable kebab-case name.
        title: One line.
        worst: The worst severity that it can have.
        commands: Those that always look for what it finds; none for a rule on the configuration itself.
        thresholds: The numbers by which it judges and which a user may move, in the order of its page.
        ruins_checkpoint: Values are lost with a finding, so that only an earlier checkpoint helps.
    """

    code: str
    name: str
    title: str
    worst: Severity
    commands: tuple[Command, ...]
    thresholds: tuple[Threshold, ...] = ()
    ruins_checkpoint: bool = False

    @property
    def page(self) -> Page:
        """What a person reads about it."""
        return read_page(self.code)
